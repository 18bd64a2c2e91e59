"""Loss curves of an Anemoi model, untouched and with our attention, in mixed precision, against the spread of two seeds.

    python benchmarks/anemoi_curves.py --output benchmarks/results/anemoi_curves.json
    python benchmarks/anemoi_curves.py --grid O8 --refinement 2 --channels 16 --heads 2 --layers 2 --training-steps 20 --device cpu

The fields to predict are a fixed smooth function of the input, which is drawn anew at every step, the same for all runs of one seed.
For each precision, two seeds are run untouched and two under `install`. Ours lies within the spread when at every step the smoothed
curves of one seed differ by no more than those of the two seeds, untouched, do at most.
"""

import json

import torch
from anemoi_step import PACKAGES, VARIANTS, Training, make_parser
from suite.environment import describe

SEEDS = (0, 1)
WINDOW = 10  # steps over which a curve is averaged
PRECISIONS = ("bf16-mixed", "16-mixed")


def fields_after(x):
    """What the model has to predict: [batch, 1, ensemble, grid, variables - 1] of the last of the input's times."""
    last = x[:, -1:, ..., :-1]
    return 0.5 * last + torch.tanh(last.roll(1, -1) * x[:, :1, ..., -1:])


def curve(training, seed, steps, context):
    """Losses of a run."""
    training.restart()
    generator = torch.Generator(training.device).manual_seed(seed)
    losses = []
    with context(training.model):
        for _ in range(steps):
            training.x["data"].normal_(generator=generator)
            training.target = fields_after(training.x["data"])
            losses.append(training.step())
    return torch.stack(losses).cpu()


def smooth(losses):
    """Means over windows of steps."""
    window = min(WINDOW, losses.shape[0])
    return losses.unfold(0, window, 1).mean(-1)


def compare(curves):
    """How far curves of one seed are apart, and those of two seeds, untouched, at most."""
    smoothed = {key: smooth(losses) for key, losses in curves.items()}
    spread = (smoothed["untouched", SEEDS[0]] - smoothed["untouched", SEEDS[1]]).abs().max().item()
    apart = {seed: (smoothed["install", seed] - smoothed["untouched", seed]).abs().max().item() for seed in SEEDS}
    return {"spread_of_seeds": spread, "apart": apart, "within": max(apart.values()) <= spread}


def main(arguments=None):
    """Run all curves; write and return the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--training-steps", type=int, default=200)
    options = parser.parse_args(arguments)
    report = {
        "environment": describe(options.device, PACKAGES, options.commit),
        "options": vars(options) | {"output": None},
    }
    for options.precision in PRECISIONS:
        curves = {}
        for seed in SEEDS:
            training = Training(options, seed)
            for name in ("untouched", "install"):
                curves[name, seed] = curve(training, seed, options.training_steps, VARIANTS[name])
        report[options.precision] = compare(curves)
        report[options.precision]["losses"] = {f"{name}, seed {seed}": c.tolist() for (name, seed), c in curves.items()}
        print(options.precision, {key: found for key, found in report[options.precision].items() if key != "losses"})
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return report


if __name__ == "__main__":
    main()
