"""The sharding benchmark runs on a small model and two ranks."""

import json

import pytest
import sharding
from support.forked import forked_commands


@pytest.mark.ranks
@pytest.mark.nightly
def test_one_and_two_ranks_and_models_of_anemoi_are_compared_and_timed(tmp_path, monkeypatch):
    # gloo lacks collectives that the sharding of anemoi-models uses
    def feasible(options, ranks, tasks=sharding.tasks_of):
        return [task for task in tasks(options, ranks) if ranks == 1 or task["part"] != "anemoi"]

    monkeypatch.setattr(sharding, "tasks_of", feasible)
    out = tmp_path / "sharding.json"
    options = ["--tiny", "--ranks", "2", "--output", str(out), "--commit", "abc"]
    arguments = [*options, "--parts", "strong", "anemoi", "networks", "steps"]
    with forked_commands():
        assert sharding.main(arguments) == 0, out.read_text()
    report = json.loads(out.read_text())
    results = report["results"]
    records = {}
    for record in results:
        kind = (record["part"], record["ranks"], record.get("halo_bytes", 0) > 0)
        records.setdefault(kind, []).append(record["model"])
    networks = [*sharding.NETWORKS, sharding.HALO_NETWORK]
    assert records == {
        ("strong", 1, False): ["anemoi_gt"],
        ("anemoi", 1, False): [*sharding.ANEMOI[::2], sharding.HALO],
        ("networks", 1, False): networks,
        ("strong", 2, True): ["anemoi_gt"],
        ("networks", 2, False): networks,
        ("steps", 1, False): ["anemoi_gt"] * 2,  # parameters whole and divided
        ("steps", 2, True): ["anemoi_gt"] * 2,
    }
    losses = [record["last_loss"] for record in results if record["part"] == "steps"]
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5)
    assert "efficiency" in sharding.tables(report)


def test_strategies_of_anemoi_are_compiled_too_and_its_halo_is_replayed(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # for CUDA graphs
    options = sharding.parse(["--ranks", "2", "--parts", "compiled", "replay", "anemoi"])

    def names_of(ranks):
        names = [sharding.name_of(task) for task in sharding.tasks_of(options, ranks)]
        return [name for name in names if name.startswith("anemoi-models")]

    edges, heads, install = sharding.ANEMOI
    expected = [
        edges,
        f"{edges}, compiled",
        install,
        f"{install}, compiled",
        sharding.HALO,
        f"{sharding.HALO}, compiled",
        f"{sharding.HALO}, CUDA graph",
        f"{sharding.HALO}, compiled, CUDA graph",
    ]
    assert names_of(1) == expected
    assert sorted(names_of(2)) == sorted([*expected, heads])
