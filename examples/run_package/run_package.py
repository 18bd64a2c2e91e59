"""Run a package of a model with only PyTorch, without anemoi_gt.

    python run_package.py model.pt2 fields.pt time.pt forecast.pt

The inputs are those that the metadata name, tensors written by torch.save: fields [batch, nodes,
channels], float32, in physical units, and for data with dates the time [batch], float64.
forecast.pt can be read by torch.load.
"""

import os
import sys

import torch
import torch._inductor.codecache  # aoti_load_package of torch 2.10 needs it and does not import it


def main(package_name: str, *names: str) -> None:
    """Load the package, print its metadata, and run it."""
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"  # PyTorch checks the inputs in every call
    package = torch._inductor.aoti_load_package(package_name)
    metadata = package.get_metadata()
    for name in ("inputs", "outputs", "forecast"):
        print(f"{name}: {metadata[name]}")
    *input_names, output_name = names
    inputs = [torch.load(name, weights_only=True) for name in input_names]
    with torch.inference_mode():
        forecast = package(*(tensor.to(metadata["AOTI_DEVICE_KEY"]) for tensor in inputs))
    torch.save(forecast.cpu(), output_name)


if __name__ == "__main__":
    main(*sys.argv[1:])
