"""An adapter whose framework is not there says what to install."""

from tests import fresh


def test_tianshou_is_not_installed():
    said = fresh.run(
        """
        import sys

        sys.modules["tianshou"] = None
        try:
            import engram.adapters.tianshou
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert said == 'engram.adapters.tianshou: needs tianshou: pip install "engram-replay[tianshou]".'
