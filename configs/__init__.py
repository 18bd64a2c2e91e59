"""Hydra configs of anemoi_gt. Other applications reach them by `hydra.searchpath=[pkg://anemoi_gt.configs]`."""
