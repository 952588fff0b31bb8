// Where the nodes of a plan's graph lie: columns from left to right, in each the operators from top to bottom (dagre).
"use strict";
weft.layout = (() => {
  const [WIDE, HIGH] = [204, 46]; // of a node
  const [PAD, HEAD] = [12, 30]; // around the nodes of a column, and above them for its title

  // Nodes by name with their sizes, and edges [source, reader]; gives the graph with what dagre found.
  const laid = (options, nodes, edges) => {
    const made = new dagre.graphlib.Graph().setGraph(options).setDefaultEdgeLabel(() => ({}));
    for (const [name, width, height] of nodes) made.setNode(String(name), { width, height });
    for (const [source, reader] of edges) made.setEdge(String(source), String(reader));
    dagre.layout(made);
    return made;
  };

  // {width, height, columns: [{x, y, width, height}], nodes: Map id -> {x, y}, lines: [{source, reader, moved, path}]}
  return (graph) => {
    const home = new Map();
    graph.columns.forEach((column, at) => column.nodes.forEach((node) => home.set(node.id, at)));
    const inner = graph.columns.map((column, at) =>
      laid(
        { rankdir: "TB", nodesep: 16, ranksep: 26 },
        column.nodes.map((node) => [node.id, WIDE, HIGH]),
        graph.edges.filter(([source, reader]) => home.get(source) === at && home.get(reader) === at),
      ),
    );
    const between = new Map();
    for (const [source, reader] of graph.edges) {
      const pair = [home.get(source), home.get(reader)];
      if (pair[0] !== pair[1]) between.set(pair.join(" "), pair);
    }
    const outer = laid(
      { rankdir: "LR", align: "UL", nodesep: 34, ranksep: 64, edgesep: 16, marginx: 10, marginy: 26 },
      inner.map((own, at) => [at, own.graph().width + 2 * PAD, own.graph().height + HEAD + PAD]),
      between.values(),
    );
    const columns = inner.map((own, at) => {
      const { x, y, width, height } = outer.node(String(at));
      return { x: x - width / 2, y: y - height / 2, width, height };
    });
    const nodes = new Map();
    inner.forEach((own, at) =>
      graph.columns[at].nodes.forEach(({ id }) => {
        const { x, y } = own.node(String(id));
        nodes.set(id, { x: columns[at].x + PAD + x - WIDE / 2, y: columns[at].y + HEAD + y - HIGH / 2 });
      }),
    );
    const round = (value) => Math.round(value * 10) / 10;
    // Through the points, each piece a curve that leaves and arrives along the direction of the layout.
    const curve = (points, isDown) =>
      points
        .map(([x, y], i) => {
          if (!i) return `M${round(x)} ${round(y)}`;
          const [u, v] = points[i - 1];
          const [c, d] = isDown ? [u, (v + y) / 2] : [(u + x) / 2, v];
          const [e, f] = isDown ? [x, (v + y) / 2] : [(u + x) / 2, y];
          return `C${[c, d, e, f, x, y].map(round).join(" ")}`;
        })
        .join("");
    const within = (source, reader) => {
      const at = home.get(source);
      const { points } = inner[at].edge(String(source), String(reader));
      const [left, top] = [columns[at].x + PAD, columns[at].y + HEAD];
      const found = points.map(({ x, y }) => [left + x, top + y]);
      found[0] = [nodes.get(source).x + WIDE / 2, nodes.get(source).y + HIGH];
      found[found.length - 1] = [nodes.get(reader).x + WIDE / 2, nodes.get(reader).y];
      return curve(found, true);
    };
    // Whether no other node of its column lies between a node and a side of the column.
    const isFree = (at, node, side) =>
      graph.columns[at].nodes.every(({ id }) => {
        const other = nodes.get(id);
        const isBetween = side > node.x ? other.x > node.x : other.x < node.x;
        return !isBetween || Math.abs(other.y - node.y) >= HIGH;
      });
    // The way from a node down (or up) into the room between two rows.
    const below = ({ x, y }, sign = 1) => {
      const edge = sign > 0 ? y + HIGH : y;
      return [
        [x + WIDE / 2, edge],
        [x + WIDE / 2, edge + sign * 13],
      ];
    };
    const across = (source, reader) => {
      const [from, to] = [home.get(source), home.get(reader)];
      const [a, b] = [columns[from], columns[to]];
      const { points } = outer.edge(String(from), String(to));
      const isBack = b.x < a.x; // dagre turned it round, since the columns read each other
      const [start, end] = [nodes.get(source), nodes.get(reader)];
      const [out, into] = [a.x + (isBack ? 0 : a.width), b.x + (isBack ? b.width : 0)];
      const leave = isFree(from, start, out) ? [[start.x + (isBack ? 0 : WIDE), start.y + HIGH / 2]] : below(start);
      const arrive = isFree(to, end, into) ? [[end.x + (isBack ? WIDE : 0), end.y + HIGH / 2]] : below(end, -1);
      const straight = (points) => points.map((point) => `L${point.map(round).join(" ")}`).join("");
      const middle = points.slice(1, -1).map(({ x, y }) => [x, y]);
      const bends = middle.filter(([x]) => (isBack ? x < out && x > into : x > out && x < into));
      const way = [[out, leave.at(-1)[1]], ...(middle.length > 1 ? bends : []), [into, arrive.at(-1)[1]]];
      return `M${straight(leave).slice(1)}L${curve(way, false).slice(1)}${straight([...arrive].reverse())}`;
    };
    const lines = graph.edges.map(([source, reader, moved]) => ({
      source,
      reader,
      moved,
      path: home.get(source) === home.get(reader) ? within(source, reader) : across(source, reader),
    }));
    const { width, height } = outer.graph();
    return { width, height: height + 14, columns, nodes, lines, WIDE, HIGH };
  };
})();
