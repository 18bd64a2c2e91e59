"""Run a package of a model with PyTorch alone; anemoi_gt need not be installed.

    python run_package.py model.pt2 x.pt change.pt

x.pt is a file of torch.save, a float32 tensor [samples, nodes, channels]; change.pt is written so that torch.load reads it.
"""

import sys

import torch


def main(package_name: str, input_name: str, output_name: str) -> None:
    """Load the package, say what it wants, and run it."""
    package = torch._inductor.aoti_load_package(package_name)
    metadata = package.get_metadata()
    for name in ("inputs", "outputs", "forecast"):
        print(f"{name}: {metadata[name]}")
    x = torch.load(input_name, weights_only=True)
    with torch.inference_mode():
        change = package(x.to(metadata["AOTI_DEVICE_KEY"]))
    torch.save(change.cpu(), output_name)


if __name__ == "__main__":
    main(*sys.argv[1:])
