"""One supernet under four consistencies: which version of its weights each step sees.

Trains the same supernet on the same stream with every layer exact, delayed, lagged and bounded. Prints the mean loss of
the last steps and the fingerprint of each run. The runs have different results, and each gives the same result whenever
it is repeated; `delayed(0)` means the same as `exact` and has its fingerprint. The last two make one update in four
steps, and so their losses fall more slowly:

    exact           loss 0.2376  fingerprint 4aa436f5...
    delayed(0)      loss 0.2376  fingerprint 4aa436f5...
    delayed(3)      loss 0.4113  fingerprint aff69155...
    lagged(4)       loss 1.3888  fingerprint 9e3e51ee...
    bounded(4, 3)   loss 1.3422  fingerprint 5ec69815...
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean
from typing import Any

import weft
from weft.zoo import digits_mlp

OPTIONS: dict[str, Any] = {"steps": 200, "batch_size": 32, "optimizer": weft.Optimizer("sgd", lr=0.3), "seed": 0}


def main() -> None:
    data = weft.data.digits()
    for consistency in ("exact", "delayed(0)", "delayed(3)", "lagged(4)", "bounded(4, 3)"):
        losses: list[float] = []

        def note(event: Mapping[str, Any], losses: list[float] = losses) -> None:
            if event["event"] == "step":
                losses.append(event["loss"])

        run = weft.train(digits_mlp, data, consistency=consistency, callbacks=[note], **OPTIONS)
        print(f"{consistency:15} loss {mean(losses[-50:]):.4f}  fingerprint {run.fingerprint}")


if __name__ == "__main__":
    main()
