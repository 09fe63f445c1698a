# SPDX-License-Identifier: Apache-2.0
"""The public names: few, sorted, and all there."""

from __future__ import annotations

import pytest

import specla


def test_at_most_twelve_names() -> None:
    assert len(specla.__all__) <= 12


def test_dir_is_all() -> None:
    assert dir(specla) == sorted(specla.__all__)


@pytest.mark.parametrize("name", sorted(specla.__all__))
def test_every_name_resolves(name: str) -> None:
    value = getattr(specla, name)
    assert name == "__version__" or value.__name__ == name
    assert name == "__version__" or value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        specla.Nonsense  # noqa: B018
