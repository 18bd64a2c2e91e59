import json

from distributed.ranks import ROOT, spawn


def test_the_benchmark_of_sharding_runs_small_on_two_ranks(tmp_path):
    out = tmp_path / "sharding.json"
    arguments = [ROOT / "benchmarks" / "sharding.py", "--tiny", "--ways", "overlapped", "--out", out, "--commit", "abc"]
    ended = spawn(arguments, 2)
    assert [end.status for end in ended] == [0, 0], ended
    report = json.loads(out.read_text())
    assert report["environment"]["commit"] == "abc"
    assert [(result["ranks"], result["halo_bytes"] > 0) for result in report["results"]] == [(1, False), (2, True)]
