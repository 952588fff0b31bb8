"""Device memory of the stages over time: bytes of layers, and when each layer was loaded and evicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.trace.reader import STATES, Numbers, StageTrace, Trace

POINTS = 2000
"""The most points of time over all stages, and the most spans over all layers."""

SERIES = ("resident", "arriving", "leaving", "pinned")
ARRIVING, RESIDENT, LEAVING = range(3)
Window = tuple[float, float]


def device_memory(trace: Trace, window: Window, budgets: Sequence[int | None]) -> list[dict[str, Any]]:
    """An entry for each stage whose layers live on the host, in seconds after the first operation.

    The largest layers are shown; ``left_out`` counts the others.
    """
    with_layers = [(number, stage) for number, stage in enumerate(trace.stages) if len(stage.memory["time"])]
    most = POINTS // max(len(with_layers), 1)
    found = []
    for number, stage in with_layers:
        times = np.maximum(stage.memory["time"] - trace.begin, 0.0)
        layers = _layers(stage, times, trace.end - trace.begin, window)
        shown, rest = _fitting(layers, most, (window[1] - window[0]) / 1000)
        series = _series(stage, times, window, max(most, 20))
        found.append({"stage": number, "budget": budgets[number], **series, "layers": shown, "left_out": rest})
    return found


def _series(stage: StageTrace, times: Numbers, window: Window, most: int) -> dict[str, list[float]]:
    """The bytes at each change within the window, and at its edges; of many, those with the most on the device."""
    first = max(int(np.searchsorted(times, window[0], side="right")) - 1, 0)
    last = int(np.searchsorted(times, window[1], side="right"))
    places = np.arange(first, max(last, first + 1))
    if len(places) > most:
        bucket = np.minimum((places - first) * most // len(places), most - 1)
        taken = stage.memory["resident"] + stage.memory["arriving"] + stage.memory["leaving"]
        order = np.lexsort((taken[places], bucket))
        fullest = places[order][np.flatnonzero(np.diff(bucket[order], append=most))]
        places = np.union1d(fullest, places[-1:])
    shown = np.clip(times[places], *window)
    found = {"time": np.round(np.append(shown, window[1]), 6).tolist()}
    ends = np.append(places, places[-1])  # nothing changes after the last
    return {**found, **{name: stage.memory[name][ends].tolist() for name in SERIES}}


def _layers(stage: StageTrace, times: Numbers, end: float, window: Window) -> list[dict[str, Any]]:
    columns, count = stage.memory, len(times)
    layer, state = columns["layer"], columns["state"]
    order = np.argsort(layer, kind="stable")
    alone = np.append(np.diff(layer[order]) != 0, True)
    until = np.where(alone, end, times[order][np.minimum(np.arange(count) + 1, count - 1)])
    # A trace has no event for the end of an eviction: a layer has left once no bytes are leaving.
    over = np.append(np.flatnonzero(columns["leaving"] == 0), count)
    gone = np.append(times, end)[over[np.searchsorted(over, order)]]
    until = np.where(state[order] == LEAVING, np.minimum(until, gone), until)
    bytes_of = _sizes(stage)
    spans: dict[int, list[list[Any]]] = {number: [] for number in range(len(stage.layers))}
    began = times[order]
    for place in np.flatnonzero((until > window[0]) & (began < window[1]) & (until > began)):
        own = spans[int(layer[order[place]])]
        word, start, to = STATES[state[order[place]]], max(float(began[place]), window[0]), float(until[place])
        if own and own[-1][0] == word and own[-1][2] >= start:
            own[-1][2] = min(to, window[1])
        else:
            own.append([word, start, min(to, window[1])])
    return [
        {"name": name, "bytes": bytes_of.get(number), "spans": spans[number]}
        for number, name in enumerate(stage.layers)
        if spans[number]
    ]


def _sizes(stage: StageTrace) -> dict[int, int]:
    """Bytes of layers, from changes of the memory that one layer alone made."""
    columns = stage.memory
    moves = np.flatnonzero(columns["state"] != RESIDENT)
    taken = (columns["resident"] + columns["arriving"])[moves]
    change = np.diff(taken, prepend=0)
    alone = (change != 0) & np.append(change[1:] != 0, True)
    right = np.where(columns["state"][moves] == ARRIVING, change > 0, change < 0)
    sizes: dict[int, set[int]] = {}
    for place in np.flatnonzero(alone & right):
        sizes.setdefault(int(columns["layer"][moves[place]]), set()).add(abs(int(change[place])))
    return {layer: values.pop() for layer, values in sizes.items() if len(values) == 1}


def _fitting(layers: list[dict[str, Any]], most: int, short: float) -> tuple[list[dict[str, Any]], int]:
    """The largest layers that fit, in their order, and the number of the others."""
    if sum(len(own["spans"]) for own in layers) > most:
        layers = [{**own, "spans": _joined(own["spans"], short)} for own in layers]
    room, kept = most, set()
    for place in sorted(range(len(layers)), key=lambda place: -(layers[place]["bytes"] or 0)):
        room -= len(layers[place]["spans"])
        if room < 0:
            break
        kept.add(place)
    shown = [layers[place] for place in sorted(kept)]
    for own in shown:
        own["spans"] = [[word, round(start, 6), round(end, 6)] for word, start, end in own["spans"]]
    return shown, len(layers) - len(shown)


def _joined(spans: list[list[Any]], short: float) -> list[list[Any]]:
    """Spans without those that are too short to be seen; their neighbours become one."""
    found: list[list[Any]] = []
    for word, start, end in spans:
        if found and found[-1][0] == word and start - found[-1][2] < short:
            found[-1][2] = end
        elif end - start >= short or not found:
            found.append([word, start, end])
    return found
