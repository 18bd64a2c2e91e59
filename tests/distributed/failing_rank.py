"""The training application with a rank that fails before a step, but not again after a restart by torchrun.

python failing_rank.py KIND RANK STEP [arguments of the application]        KIND: killed, frozen or raising
"""

import os
import signal
import sys
import time

started = time.time()  # before the imports, which take seconds


def fail(kind):
    print(f"{kind} at {time.time()}", flush=True)
    if kind == "raising":
        raise RuntimeError("a bug on this rank only")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[kind])


def main(kind, rank, step, *arguments):
    from anemoi_gt.app import train_command as train
    from anemoi_gt.app.training.sharded import ShardedTrainingStep

    take_step = ShardedTrainingStep.training_step

    def training_step(self, batch):
        if self.global_step == int(step):
            fail(kind)
        return take_step(self, batch)

    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ShardedTrainingStep.training_step = training_step
    sys.argv[1:] = arguments
    train.main()


if __name__ == "__main__":
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
        print(f"restarted at {started}", flush=True)
    main(*sys.argv[1:])
