"""Options of the test run: the device that the laws are tried on."""

import os
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device the laws run on")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def generator(device):
    return torch.Generator(device).manual_seed(0)


@pytest.fixture
def real_data():
    """The folder of real data sets, where there is one."""
    root = os.environ.get("UNNORM_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("UNNORM_DATA does not name a folder with the real data sets")
    return Path(root)
