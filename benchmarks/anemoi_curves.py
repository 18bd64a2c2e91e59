"""Loss curves of Anemoi's models, untouched and in other variants, against the seed spread.

    python benchmarks/anemoi_curves.py --output benchmarks/results/anemoi_curves.json
    python benchmarks/anemoi_curves.py ensemble diffusion --precisions 16-mixed
    python benchmarks/anemoi_curves.py ensemble --configs FOLDER --grid O8 --refinement 2
    --channels 16 --layers 2 --training-steps 20

Cases, variants and options are those of `families.py`; ensemble and diffusion model are small, see
`SMALL`. The fields to predict are a fixed smooth function of the input, which is drawn at every
step, the same for all runs of one seed, as are the noise of an ensemble and of a diffusion model.
For each case and precision, two seeds are run of each variant.

Tolerance, fixed before any run: curves agree if, at every step, the smoothed curves of one seed
differ by no more than the largest distance between two seeds, untouched.
"""

from functools import partial

import torch
from families import (
    add_model_options,
    case_of,
    check_cases,
    free_memory,
    make_training,
    matching_variants,
    start_report,
)
from suite import command_line
from suite.anemoi_training import CASES, PRECISIONS
from suite.results import Results

SEEDS = (0, 1)
WINDOW = 10  # steps over which a curve is averaged
# 1,600 steps of both, 16-mixed, are meant to take two minutes on one GPU.
SMALL = {"channels": 256, "layers": 2, "grid": "O32", "refinement": 4}
SIZES = {
    "benchmark": {"grid": "O96", "refinement": 5},
    "ensemble": SMALL,
    "diffusion": SMALL,
}


def curve(training, seed, steps, variant):
    """Return the losses of a run."""
    generator = torch.Generator(training.device).manual_seed(seed)
    losses = []
    with training.computing(variant):
        torch.manual_seed(seed)  # of the noise of an ensemble
        for _ in range(steps):
            training.draw(generator)
            losses.append(training.step())
    return torch.stack(losses).cpu()


def compare(curves):
    """Return each variant's maximum distance from the untouched curve, and another seed's."""
    smoothed = {}
    for key, losses in curves.items():
        smoothed[key] = losses.unfold(0, min(WINDOW, len(losses)), 1).mean(-1)
    first, second = (smoothed["untouched", seed] for seed in SEEDS)
    spread = (first - second).abs().max().item()
    apart = {}
    for (variant, seed), losses in smoothed.items():
        if variant != "untouched":
            distance = (losses - smoothed["untouched", seed]).abs().max().item()
            apart.setdefault(variant, {})[seed] = distance
    within = {}
    for variant, distances in apart.items():
        within[variant] = all(distance <= spread for distance in distances.values())
    return {"spread_of_seeds": spread, "apart": apart, "within": within}


def run_curves(case, precision, options, results):
    """Return the curves of a case in a precision, and how far they are apart."""
    options.precision = precision
    curves, losses_of = {}, {}
    for seed in SEEDS:
        training = make_training(case, options, seed)
        for variant in options.variants:
            title = f"{variant}, seed {seed}"
            call = partial(curve, training, seed, options.training_steps, variant)
            losses = results.run(f"{case.family}, {precision}, {title}", call)
            if losses is not None:
                curves[variant, seed] = losses
                losses_of[title] = losses.tolist()
        del training
        free_memory()
    found = {"losses": losses_of}
    if all(("untouched", seed) in curves for seed in SEEDS):
        found |= compare(curves)
    return found


def make_parser():
    """Return the command line."""
    parser = command_line.make_parser(
        __doc__, seconds=540, variables=100, mapper_chunks=1, training_steps=200
    )
    add_model_options(parser)
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, default=["bf16-mixed", "16-mixed"]
    )
    parser.add_argument(
        "--variants", nargs="+", metavar="PATTERN", default=["untouched", "install"]
    )
    return parser


def main(arguments=None):
    """Run all curves; write and return the report."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_cases(parser, options)
    options.variants = matching_variants(options.variants)
    results = Results(start_report(options), options.output, options.seconds)
    for name in options.cases or ["benchmark"]:
        small = CASES[name]._replace(**SIZES.get(name, {}))
        case = case_of(small, options)
        of_case = results.report[name] = {"case": case._asdict()}
        for precision in options.precisions:
            call = partial(run_curves, case, precision, options, results)
            found = results.run(f"{name}, {precision}", call)
            if found is None:
                continue
            of_case[precision] = found
            distances = {key: value for key, value in found.items() if key != "losses"}
            print(name, precision, distances, flush=True)
    return results.end()


if __name__ == "__main__":
    main()
