"""Run a package without this library: `python -I load_package.py model.pt2 x.pt out.pt`."""

import sys

import torch
import torch._inductor.codecache  # aoti_load_package of torch 2.10 needs it and does not import it

if __name__ == "__main__":
    sys.modules["anemoi_gt"] = None  # any import of it fails from here on
    package = torch._inductor.aoti_load_package(sys.argv[1])
    x = torch.load(sys.argv[2], weights_only=True).to(package.get_metadata()["AOTI_DEVICE_KEY"])
    with torch.inference_mode():
        torch.save(package(x).cpu(), sys.argv[3])
