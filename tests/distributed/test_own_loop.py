"""The code of the page on several GPUs under torchrun; its script gives the same numbers on 1, 2 and 4 ranks."""

import re

import pytest
from support.forked import Program
from support.pages import FILE, ROOT, blocks

pytestmark = pytest.mark.ranks

PAGE = ROOT / "docs" / "distributed.md"
CODE = blocks(PAGE, "python")
(SCRIPT,) = (code for code in CODE if FILE.match(code))
PATIENCE = 300  # s, of two or four ranks on a busy machine
LINE = re.compile(r"^step (\d+): loss (\S+), forecast of city 7 \[(.*)\]$", re.MULTILINE)


def run(code, folder, ranks):
    """Run code under torchrun; return its output."""
    (folder / "script.py").write_text(code)
    options = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "script.py",
    )
    status, output, error = Program(*options, folder=folder).finish(PATIENCE)
    assert status == 0, error
    return output


def numbers(code, folder, ranks):
    """Return the last step of the script, its loss and a forecast."""
    ((step, loss, forecast),) = LINE.findall(run(code, folder, ranks))
    return int(step), [float(loss), *map(float, forecast.split(","))]


def test_the_script_has_at_most_60_lines_of_code():
    assert len([line for line in SCRIPT.splitlines() if line]) <= 60


def test_the_script_gives_the_numbers_of_one_rank_even_if_resumed_on_another_number(tmp_path):
    (tmp_path / "one").mkdir()
    _, expected = numbers(SCRIPT, tmp_path / "one", 1)
    as_on_gpus = SCRIPT.replace("lr=1e-2", "lr=1e-2, foreach=True")  # the default there
    half = as_on_gpus.replace("DIVIDE = 40, 8,", "DIVIDE = 40, 4,")
    divided = half.replace('"cities"), False', '"cities"), True')
    assert numbers(divided, tmp_path, 2)[0] == 4
    # two models of two ranks, which read the divided parameters whole
    step, values = numbers(SCRIPT, tmp_path, 4)
    assert step == 8
    assert values == pytest.approx(expected, rel=1e-5)


def test_the_other_code_of_the_page_runs_on_two_ranks(tmp_path):
    code = "\n".join(code for code in CODE if code != SCRIPT)
    alone = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    assert alone in code
    run(code.replace(alone, 'dist.init_process_group("gloo")'), tmp_path, 2)
