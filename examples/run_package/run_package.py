"""Run a package of a model with only PyTorch, without anemoi_gt.

    python run_package.py model.pt2 x.pt change.pt

x.pt is a float32 tensor [batch, nodes, channels] written by torch.save; change.pt can be read by torch.load.
"""

import sys

import torch


def main(package_name: str, input_name: str, output_name: str) -> None:
    """Load the package, print its metadata, and run it."""
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
