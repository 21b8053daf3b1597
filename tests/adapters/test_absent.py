"""An adapter whose framework is not there says what to install."""

import pytest

from tests import fresh


@pytest.mark.parametrize(("adapter", "framework"), [("tianshou", "tianshou"), ("rllib", "ray")])
def test_a_framework_is_not_installed(adapter, framework):
    said = fresh.run(
        """
        import importlib, sys

        sys.modules[framework] = None
        try:
            importlib.import_module(f"engram.adapters.{adapter}")
        except ModuleNotFoundError as error:
            print(error)
        """,
        adapter=adapter,
        framework=framework,
    )
    assert said.startswith(f"engram.adapters.{adapter}: needs {framework}")
    assert said.endswith(f': pip install "engram-replay[{adapter}]".')
