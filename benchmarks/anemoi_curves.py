r"""Loss curves of Anemoi's models, untouched and in other variants, relative to the seed spread.

    python benchmarks/anemoi_curves.py --output benchmarks/results/anemoi_curves.json
    python benchmarks/anemoi_curves.py ensemble diffusion --precisions 16-mixed
    python benchmarks/anemoi_curves.py ensemble --configs FOLDER --grid O8 --refinement 2 \
        --channels 16 --layers 2 --training-steps 20

See `families.py` for cases, variants and options; the ensemble and the diffusion model are small,
see `SMALL`. The fields to predict are a fixed smooth function of the input. At every step, the
input and the noise of an ensemble or a diffusion model are drawn again, the same for all runs with
one seed. For each case and precision, each variant runs with two seeds.

The tolerance was fixed before any run: curves agree if, at every step, the smoothed curves of one
seed differ by no more than the maximum distance between two seeds of the untouched model.
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
# chosen so that 1,600 steps of both, 16-mixed, take about two minutes on one GPU
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
    """Return the maximum distance from the untouched curve, for each variant and another seed."""
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
    """Return the curves of a case in a precision, and their distances."""
    options.precision = precision
    curves = {}
    losses_by_title = {}
    for seed in SEEDS:
        training = make_training(case, options, seed)
        for variant in options.variants:
            title = f"{variant}, seed {seed}"
            call = partial(curve, training, seed, options.training_steps, variant)
            losses = results.run(f"{case.family}, {precision}, {title}", call)
            if losses is not None:
                curves[variant, seed] = losses
                losses_by_title[title] = losses.tolist()
        del training
        free_memory()
    record = {"losses": losses_by_title}
    if all(("untouched", seed) in curves for seed in SEEDS):
        record |= compare(curves)
    return record


def make_parser():
    """Return the parser of the command line."""
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
        case_report = {"case": case._asdict()}
        results.report[name] = case_report
        for precision in options.precisions:
            call = partial(run_curves, case, precision, options, results)
            record = results.run(f"{name}, {precision}", call)
            if record is None:
                continue
            case_report[precision] = record
            distances = {key: value for key, value in record.items() if key != "losses"}
            print(name, precision, distances, flush=True)
    return results.end()


if __name__ == "__main__":
    main()
