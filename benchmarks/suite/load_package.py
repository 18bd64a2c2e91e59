"""Run and time a package in a process that has PyTorch and nothing of ours; for benchmarks and checks, which start it.

python -I load_package.py model.pt2 x.pt out.pt REPEATS     prints a line of JSON
"""

import json
import statistics
import sys
import time

import torch


def main(package_name: str, input_name: str, output_name: str, repeats: str) -> None:
    """Load the package, run it, and say how long either takes."""
    sys.modules["anemoi_gt"] = None  # whoever imports it from here on fails
    begin = time.perf_counter()
    package = torch._inductor.aoti_load_package(package_name)
    loaded = time.perf_counter() - begin
    x = torch.load(input_name, weights_only=True).to(package.get_metadata()["AOTI_DEVICE_KEY"])
    with torch.inference_mode():
        out, times = package(x), []
        for _ in range(int(repeats)):
            wait(x)
            begin = time.perf_counter()
            package(x)
            wait(x)
            times.append(1e3 * (time.perf_counter() - begin))
    torch.save(out.cpu(), output_name)
    peak = torch.cuda.max_memory_allocated() / 1e9 if x.is_cuda else None
    print(json.dumps({"load_s": loaded, "package_ms": statistics.median(times), "package_peak_gb": peak}))


def wait(tensor: torch.Tensor) -> None:
    """Until its device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
