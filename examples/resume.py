"""Stop a run in the middle, resume it, and get the same run to the last bit.

Trains a small supernet undisturbed; trains it again and presses Ctrl-C in the middle; resumes that one. Prints where it
was stopped and the fingerprints (SHA-256 over every weight, optimizer state and loss) of both, which are equal:

    undisturbed      6fb00099...
    stopped          after 20 of 40 steps, with a checkpoint
    resumed          6fb00099...
    the same to the last bit: yes
"""

from __future__ import annotations

import signal
from typing import Any

import weft
from weft.zoo import digits_mlp

OPTIONS: dict[str, Any] = {"steps": 40, "batch_size": 32, "optimizer": weft.Optimizer("adamw", lr=2e-3), "seed": 0}


def press_ctrl_c(event: Any) -> None:
    """A callback sees every event of a run; this one does what a user does who has lost patience."""
    if event["event"] == "step" and event["step"] == 19:
        signal.raise_signal(signal.SIGINT)


def main() -> None:
    data = weft.data.digits()
    whole = weft.train(digits_mlp, data, run="undisturbed", **OPTIONS)
    print(f"undisturbed      {whole.fingerprint}")
    try:
        weft.train(digits_mlp, data, run="stopped", callbacks=[press_ctrl_c], **OPTIONS)
    except KeyboardInterrupt:
        saved = weft.Run.open("runs/stopped").checkpoints.steps()[-1]
        print(f"stopped          after {saved} of {OPTIONS['steps']} steps, with a checkpoint")
    resumed = weft.train(digits_mlp, data, run="stopped", resume=True, **OPTIONS)
    print(f"resumed          {resumed.fingerprint}")
    print(f"the same to the last bit: {'yes' if resumed.fingerprint == whole.fingerprint else 'NO'}")


if __name__ == "__main__":
    main()
