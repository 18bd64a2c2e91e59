"""Fields of files and data sets, arranged as the application does by default."""

from anemoi_gt.app.datasets.fields import arrange, group, on_largest_grid
from anemoi_gt.app.datasets.readers import read_files
from anemoi_gt.app.datasets.xarray_reader import read_dataset


def arrange_all(series):
    """Return all series that are on the grid of most."""
    return arrange(on_largest_grid(group(series)))


def fields_of(source):
    """Return the fields of an xarray data set, or of files."""
    series = read_dataset(source)[0] if hasattr(source, "data_vars") else read_files(source)
    return arrange_all(series)


def fields_of_anemoi(path):
    """Return the fields of a zarr of anemoi-datasets."""
    return arrange_all(read_files(path, "anemoi"))
