"""Figures of the documentation: they show what the library computes, and have captions and labels."""

import importlib
import json
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support.pages import PAGES, ROOT, name_of

from anemoi_gt.data.meshes import icosphere


@pytest.fixture(scope="module")
def extension():
    """Import an extension of the documentation by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "_ext"))
        patch.setattr(sys, "path", [*sys.path])
        yield importlib.import_module


def elements(html):
    """Return the elements of a figure by tag, without namespaces."""
    elements_by_tag = {}
    for element in ElementTree.fromstring(html).iter():
        elements_by_tag.setdefault(element.tag.rpartition("}")[2], []).append(element)
    return elements_by_tag


def test_halo_in_the_figure_agrees_with_a_loop_over_edges(extension):
    figure = extension("halo_figure")
    mesh = icosphere(figure.REFINEMENT)
    owner, halo = figure.shares(mesh.nodes.xyz, torch.as_tensor(mesh.edge_index))
    read = {
        j
        for j, i in mesh.edge_index.T.tolist()
        if owner[i] == figure.RANK and owner[j] != figure.RANK
    }
    assert set(halo.tolist()) == read
    assert read
    assert np.bincount(owner).max() - np.bincount(owner).min() <= 1
    words = " ".join(caption.text for caption in elements(figure.figure())["figcaption"])
    assert f"a halo of {len(read)} nodes" in words
    assert f"{(owner == figure.RANK).sum()} own nodes" in words


def test_edges_in_the_figure_and_its_captions_agree(extension):
    drawn = elements(extension("edges_figure").figure())
    counts = [int(re.search(r"(\d+) edges", caption.text)[1]) for caption in drawn["figcaption"]]
    arrows = [element for element in drawn["path"] if element.get("class") == "edges"]
    assert len(arrows) == sum(counts)
    assert counts[2] == 3  # the decoder's nearest hidden nodes


@pytest.mark.parametrize("name", ["halo_figure", "edges_figure"])
def test_map_draws_nothing_outside_its_frame(extension, name):
    side, drawn = extension("maps").SIDE, extension(name).figure()
    number = r"(-?[\d.]+)"
    points = re.findall(rf"translate\({number},{number}\)", drawn) + re.findall(
        rf'cx="{number}" cy="{number}"', drawn
    )
    assert points
    assert all(0 <= float(coordinate) <= side for point in points for coordinate in point)


def test_figures_of_results_use_only_colours_of_the_theme(extension):
    figures = extension("results_figures")
    results = json.loads((ROOT / "benchmarks" / "results" / "n320_h200.json").read_text())
    html = figures.Times.html(None, results)
    assert all(picture.get("aria-label") for picture in elements(f"<div>{html}</div>")["svg"])
    assert not re.search(r'(?:fill|stroke)="#', html)
    assert "peer0" in html
    assert "peer1" in html


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_figure_on_a_page_has_alternative_text(page):
    text = page.read_text()
    images = [re.search(r'alt="([^"]*)"', tag) for tag in re.findall(r"<img [^>]*>", text)]
    written = re.findall(r"!\[([^\]]*)\]\(", text) + [alt[1] if alt else "" for alt in images]
    for name in re.findall(r"^:file: (figures/\S+)$", text, re.MULTILINE):
        picture = (page.parent / name).read_text()
        written += [picture[picture.index("<desc") :].partition(">")[2].partition("<")[0]]
    assert all(len(words) > 20 for words in written), written
