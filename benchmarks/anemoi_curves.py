"""Loss curves of an Anemoi model, untouched and in other variants, against the seed spread.

    python benchmarks/anemoi_curves.py --output benchmarks/results/anemoi_curves.json
    python benchmarks/anemoi_curves.py --grid O8 --refinement 2 --channels 16 --layers 2
    --training-steps 20

The fields to predict are a fixed smooth function of the input, which is drawn at every step, the
same for all runs of one seed. For each precision, two seeds are run of each variant of
`anemoi_step.py` that is asked for. Curves agree if, at every step, the smoothed curves of one seed
differ by no more than the largest distance between two seeds, untouched.
"""

from functools import partial

import torch
from anemoi_step import Training, make_parser, start_report
from suite.results import Results

SEEDS = (0, 1)
WINDOW = 10  # steps over which a curve is averaged
PRECISIONS = ("bf16-mixed", "16-mixed")


def fields_after(x):
    """Return the target [batch, 1, ensemble, grid, variables - 1] for an input."""
    last = x[:, -1:, ..., :-1]
    return 0.5 * last + torch.tanh(last.roll(1, -1) * x[:, :1, ..., -1:])


def curve(training, seed, steps, name):
    """Return the losses of a run."""
    training.restart()
    generator = torch.Generator(training.device).manual_seed(seed)
    losses = []
    with training.computing(name):
        for _ in range(steps):
            training.x["data"].normal_(generator=generator)
            training.target = fields_after(training.x["data"])
            losses.append(training.step())
    return torch.stack(losses).cpu()


def compare(curves):
    """Return each variant's maximum distance from the untouched curve, and another seed's."""
    smoothed = {
        key: losses.unfold(0, min(WINDOW, len(losses)), 1).mean(-1)
        for key, losses in curves.items()
    }
    spread = (smoothed["untouched", SEEDS[0]] - smoothed["untouched", SEEDS[1]]).abs().max().item()
    apart = {}
    for (name, seed), losses in smoothed.items():
        apart.setdefault(name, {})[seed] = (losses - smoothed["untouched", seed]).abs().max().item()
    del apart["untouched"]
    within = {name: all(far <= spread for far in found.values()) for name, found in apart.items()}
    return {"spread_of_seeds": spread, "apart": apart, "within": within}


def main(arguments=None):
    """Run all curves; write and return the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--training-steps", type=int, default=200)
    options = parser.parse_args(arguments)
    results = Results(start_report(options), options.output, options.seconds)
    for precision in PRECISIONS:
        options.precision = precision
        curves, kept = {}, {"losses": {}}
        results.report[precision] = kept
        for seed in SEEDS:
            training = Training(options, seed)
            for name in options.variants:
                title = f"{name}, seed {seed}"
                call = partial(curve, training, seed, options.training_steps, name)
                losses = results.run(f"{precision}, {title}", call)
                if losses is not None:
                    curves[name, seed], kept["losses"][title] = losses, losses.tolist()
        if all(("untouched", seed) in curves for seed in SEEDS):
            kept |= compare(curves)
            print(
                precision,
                {key: found for key, found in kept.items() if key != "losses"},
                flush=True,
            )
    return results.end()


if __name__ == "__main__":
    main()
