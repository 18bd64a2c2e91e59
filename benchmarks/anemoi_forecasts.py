r"""Ten-day forecasts of an Anemoi model under `install`, beside two untouched forms of it.

    python benchmarks/anemoi_forecasts.py --output benchmarks/results/anemoi_forecasts.json
    python benchmarks/anemoi_forecasts.py --configs FOLDER --grid O8 --refinement 2 --channels 16 \
        --layers 2 --training-steps 3 --training-flows 2 --flows 2 --days 1

The model is trained here, on a chaotic flow that is known exactly (`suite.point_vortices`); all
forms compute with the same weights, in steps of 6 hours. In a table by lead time:

    error         RMS difference from the true flow, of normalised fields
    off float32   RMS difference from the untouched model in float32
    apart         RMS difference between two forms, in 16-mixed

A form agrees with the untouched model if it is no further from it than another untouched form is.
"""

import math
from functools import partial

import torch
from families import add_size_options, case_of, make_training, matching_variants, start_report
from suite import command_line, point_vortices
from suite.anemoi_training import CASES, FORCINGS, PRECISIONS
from suite.results import Results

from anemoi_gt.data.grids import grid

HOURS = 6
VORTICES = 40
UNTOUCHED, INSTALLED = "untouched", "install"
FORMS = [UNTOUCHED, "untouched, compiled whole", INSTALLED, "install, compiled whole"]
PRECISION = "16-mixed"


class Weather:
    """Normalised fields of flows in time, with forcings: the coordinates and their products."""

    def __init__(self, case, device, flows: int, steps: int, seed: int):
        generator = torch.Generator(device).manual_seed(seed)
        self.points = torch.as_tensor(grid(case.grid).xyz, device=device)
        flow = point_vortices.draw(flows, VORTICES, generator)
        self.flows = [flow]
        for _ in range(steps):
            self.flows.append(point_vortices.step(self.flows[-1], HOURS))
        x, y, z = self.points.unbind(-1)
        forcings = torch.stack([x, y, z, x * y, y * z, z * x, x * x - y * y, z * z], -1)
        self.forcings = forcings[None, None, None].float()  # [1, 1, 1, N, FORCINGS]
        sample = point_vortices.fields(flow, self.points)
        self.mean = sample.mean((0, 1))
        self.std = sample.std((0, 1))

    def state(self, time: int, flow: int) -> torch.Tensor:
        """Return the fields [1, 1, 1, N, FIELDS] of a flow after a number of steps."""
        chosen = point_vortices.Vortices(*(part[flow : flow + 1] for part in self.flows[time]))
        values = (point_vortices.fields(chosen, self.points) - self.mean) / self.std
        return values.float()[None, None]

    def model_input(self, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
        """Return two states as the input [1, 2, 1, N, FIELDS + FORCINGS] of the model."""
        states = torch.cat([before, now], dim=1)
        return torch.cat([states, self.forcings.expand(1, 2, -1, -1, -1)], dim=-1)


def train(training, weather: Weather, steps: int, results: Results) -> None:
    """Train for one step of the flow; leave the weights as the start of all variants."""
    form = "install, no recomputation"
    if training.device.type == "cuda":
        form += ", captured"
    draws = torch.Generator().manual_seed(0)
    losses = []
    with training.computing(form):
        for number in range(steps):
            time = int(torch.randint(1, len(weather.flows) - 1, (), generator=draws))
            flow = int(torch.randint(0, len(weather.flows[0].position), (), generator=draws))
            before, now, after = (weather.state(time + k, flow) for k in (-1, 0, 1))
            training.batch = {"x": weather.model_input(before, now), "target": after}
            rate = (
                1e-3 * min(1, (number + 1) / 100) * 0.5 * (1 + math.cos(math.pi * number / steps))
            )
            for group in training.optimiser.param_groups:
                group["lr"] = rate
            losses.append(training.step())
    losses = torch.stack(losses).cpu()
    results.report["losses"] = losses[:: max(1, steps // 100)].tolist()
    print(f"loss {losses[:20].mean():.4f} to {losses[-20:].mean():.6f}", flush=True)
    weights = training.model.state_dict()
    training.start = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}


@torch.no_grad()
def forecasts(training, weather: Weather, steps: int, form: str) -> torch.Tensor:
    """Return the forecasts [flows, steps, N, FIELDS] of all flows from their first two states."""
    runs = []
    with training.computing(form):
        for flow in range(len(weather.flows[0].position)):
            before, now = weather.state(0, flow), weather.state(1, flow)
            states = []
            for _ in range(steps):
                with training.autocast():
                    out = training.model({"data": weather.model_input(before, now)})["data"]
                before, now = now, out.float()
                states.append(now[0, 0, 0].cpu())
            runs.append(torch.stack(states))
    return torch.stack(runs)


def true_states(weather: Weather, steps: int) -> torch.Tensor:
    """Return what the forecasts should be."""
    runs = []
    for flow in range(len(weather.flows[0].position)):
        states = [weather.state(2 + k, flow)[0, 0, 0].cpu() for k in range(steps)]
        runs.append(torch.stack(states))
    return torch.stack(runs)


def rms(difference: torch.Tensor) -> list[float]:
    """Return the root mean square of [flows, steps, N, FIELDS] by step."""
    return difference.double().square().mean((0, 2, 3)).sqrt().tolist()


def run_forms(training, weather: Weather, steps: int, forms: list[str], results: Results) -> None:
    """Forecast in all forms; add curves by lead time to the report."""
    curves = results.report["curves"] = {}
    truth = true_states(weather, steps)
    training.dtype = PRECISIONS["32"]
    exact = forecasts(training, weather, steps, UNTOUCHED)
    curves["error, untouched in float32"] = rms(exact - truth)
    training.dtype = PRECISIONS[PRECISION]
    runs = {}

    def run(form: str) -> None:
        run = runs[form] = forecasts(training, weather, steps, form)
        curves[f"error, {form}"] = rms(run - truth)
        curves[f"off float32, {form}"] = rms(run - exact)
        for other, other_run in runs.items():
            if other != form:
                curves[f"apart, {form} and {other}"] = rms(run - other_run)

    for form in forms:
        results.run(form, partial(run, form))
    if INSTALLED in runs:
        again = forecasts(training, weather, steps, INSTALLED)
        curves[f"apart, {INSTALLED} and {INSTALLED} again"] = rms(again - runs[INSTALLED])


def make_parser():
    """Return the parser of the command line."""
    parser = command_line.make_parser(
        __doc__,
        seconds=560,
        mapper_chunks=1,
        training_steps=8000,
        training_flows=64,
        flows=4,
        days=10,
    )
    add_size_options(parser)
    parser.add_argument("--variants", nargs="+", metavar="PATTERN", default=FORMS)
    return parser


def main(arguments=None) -> dict:
    """Train, forecast, compare; write and return the report."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    small = CASES["benchmark"]._replace(grid="O96", refinement=5, channels=256, layers=8)
    case = case_of(small, options)
    options.precision = PRECISION
    options.variables = point_vortices.FIELDS + FORCINGS
    results = Results(start_report(options), options.output, options.seconds)
    training = make_training(case, options)
    results.report |= {"case": case._asdict(), "sizes": training.sizes}
    steps = options.days * 24 // HOURS
    weather = Weather(case, training.device, options.training_flows, 4 * steps, seed=1)
    call = partial(train, training, weather, options.training_steps, results)
    results.run("training", call)
    unseen = Weather(case, training.device, options.flows, 1 + steps, seed=2)
    unseen.mean, unseen.std = weather.mean, weather.std
    forms = matching_variants(options.variants)
    results.run("forecasts", partial(run_forms, training, unseen, steps, forms, results))
    results.report["hours"] = [HOURS * (k + 1) for k in range(steps)]
    for name, curve in results.report.get("curves", {}).items():
        days = [f"{value:.2e}" for value in curve[3::8]]
        print(f"{name}: day 1, 3, ...: {', '.join(days)}", flush=True)
    return results.end()


if __name__ == "__main__":
    main()
