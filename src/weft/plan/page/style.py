"""How the page of a plan looks, on light and on dark, and the little that it does."""

from __future__ import annotations

BACKGROUNDS = (("#ffffff", "#f3f5f8"), ("#12151a", "#1b2027"))  # of the page and of a column, light and dark
INKS = (("#1a1f26", "#4e5866"), ("#e8ecf1", "#a3adba"))  # of text and of notes

_LIGHT = {
    "page": BACKGROUNDS[0][0],
    "column": BACKGROUNDS[0][1],
    "ink": INKS[0][0],
    "note": INKS[0][1],
    "line": "#d5dae1",
    "still": "#8a94a2",
    "moved": "#c8430a",
    "computing": "#1c66c4",
    "bubble": "#7a8492",
    "states": "#7440c4",
    "activations": "#0b776d",
    "bad": "#b3261e",
    "good": "#24702f",
}
_DARK = {
    "page": BACKGROUNDS[1][0],
    "column": BACKGROUNDS[1][1],
    "ink": INKS[1][0],
    "note": INKS[1][1],
    "line": "#343c47",
    "still": "#6d7886",
    "moved": "#ff8a4c",
    "computing": "#6ea8fe",
    "bubble": "#8a94a2",
    "states": "#b794f6",
    "activations": "#3cc5b5",
    "bad": "#ff8a80",
    "good": "#7fd18b",
}


def _variables(values: dict[str, str]) -> str:
    return ":root{" + "".join(f"--{name}:{value};" for name, value in values.items()) + "}"


STYLE = (
    f"""
{_variables(_LIGHT)}
@media (prefers-color-scheme:dark){{{_variables(_DARK)}}}
"""
    + """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1600px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.5rem;line-height:1.2;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:34px 0 10px}
.facts{display:flex;flex-wrap:wrap;gap:12px 30px;margin:0 0 18px}
.facts div{max-width:100%}
dt,.key span,.bars .note,thead th{color:var(--note)}
dt{font-size:.8rem}
dd{margin:0;overflow-wrap:anywhere}
.key{display:flex;flex-wrap:wrap;gap:4px 22px;list-style:none;margin:8px 0;padding:0;font-size:.87rem}
.key li{overflow-wrap:anywhere}
.swatch,.stroke{display:inline-block;width:13px;height:13px;border-radius:3px;margin-right:7px;vertical-align:-1px;
 background:var(--c,var(--k))}
.stroke{width:22px;height:0;border-top:2px solid var(--still);border-radius:0;vertical-align:4px;background:none}
.stroke.moved{border-top:3px solid var(--moved)}
.bars{display:grid;grid-template-columns:minmax(60px,max-content) minmax(80px,1fr) max-content;gap:6px 12px;
 align-items:center;font-size:.87rem}
.bars .label{max-width:280px;overflow-wrap:anywhere}
.bars .note{font-variant-numeric:tabular-nums}
.bar{position:relative;display:flex;height:18px;background:var(--column);border-radius:3px}
.bar i{background:var(--k);height:100%;min-width:1px}
.bar i+i{border-left:1px solid var(--page)}
.bar .mark{position:absolute;top:-3px;bottom:-3px;width:2px;margin-left:-2px;background:var(--bad)}
.k-computing,.k-weights,.k-parameters{--k:var(--computing)}
.k-communicating{--k:var(--moved)}
.k-bubble{--k:var(--bubble)}
.k-gradients{--k:var(--states)}
.k-activations{--k:var(--activations)}
.graph,.scroll{overflow:auto;max-width:100%}
.graph{max-height:88vh;border:1px solid var(--line);border-radius:10px;margin-top:8px}
.graph svg{display:block;font:12px system-ui,sans-serif}
:focus-visible{outline:2px solid var(--computing);outline-offset:2px}
svg text{fill:var(--ink)}
.column{fill:var(--column);stroke:var(--line)}
.title{font-weight:600}
.times{font-weight:700;fill:var(--moved)}
svg .stage,svg .note{fill:var(--note)}
.name{font-weight:600}
.note{font-size:11.5px}
.box{cursor:default;outline-offset:1px}
.box rect{fill:var(--c);fill-opacity:.17;stroke:var(--c);stroke-width:1.2}
.box rect.edge{fill-opacity:1;stroke:none}
.box:hover rect,.box:focus rect{stroke-width:2.6}
.line{fill:none;stroke:var(--still);stroke-width:1.2}
.line.moved{stroke:var(--moved);stroke-width:1.8}
.line.near{stroke-width:3.4}
.tip{fill:var(--still)}
.tip.moved{fill:var(--moved)}
#told{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--column);border-radius:8px;padding:10px 14px;
 margin:8px 0 0;min-height:5.5em;font:12.5px/1.5 ui-monospace,monospace}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);white-space:nowrap;font-weight:400}
.own th,.own td{font-weight:600}
.short{width:160px}
.short .bars{display:block}
.yes{color:var(--good)}
.no{color:var(--bad);font-weight:600}
@media (max-width:640px){
 .bars{grid-template-columns:1fr;gap:2px}
 .bars .label{max-width:none}
 .bars .note{margin-bottom:8px}
 .graph{max-height:75vh}
}
"""
)

# One box at a time can be reached by the tab key, and the arrow keys go on from it.
SCRIPT = """
const boxes=[...document.querySelectorAll('.box')],told=document.getElementById('told');
let now=boxes[0];
function show(box){
 document.querySelectorAll('.near').forEach(line=>line.classList.remove('near'));
 document.querySelectorAll(`[data-ends*=" ${box.id.slice(1)} "]`).forEach(line=>line.classList.add('near'));
 now.tabIndex=-1;now=box;now.tabIndex=0;
 told.textContent=box.querySelector('title').textContent;
}
boxes.forEach((box,n)=>{
 box.onfocus=box.onmouseenter=()=>show(box);
 box.onclick=()=>box.focus();
 box.onkeydown=e=>{
  const step={ArrowDown:1,ArrowRight:1,ArrowUp:-1,ArrowLeft:-1}[e.key],next=step&&boxes[n+step];
  if(next){e.preventDefault();next.focus()}
 };
});
"""
