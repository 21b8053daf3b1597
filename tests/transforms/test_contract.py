"""Every transform keeps the contract of transforms."""

import copy
import pickle

import pytest
import torch

from engram import (
    Compose,
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    ExcludeTransform,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    SelectTransform,
    VecNorm,
)
from engram.testing import TransformContract

MAKERS = {
    "VecNorm": lambda: VecNorm(["observation"], decay=0.5),
    "ObservationNorm": lambda: ObservationNorm(1.0, 2.0, ["observation"]),
    "RewardScaling": lambda: RewardScaling(0.5, 2.0, [("next", "reward")]),
    "DoubleToFloat": lambda: DoubleToFloat(in_keys=["observation"]),
    "DTypeCast": lambda: DTypeCastTransform(torch.float32, torch.float64, in_keys=["observation"]),
    "DeviceCast": lambda: DeviceCastTransform("cpu"),
    "Rename": lambda: RenameTransform(["observation"], ["seen"]),
    "Select": lambda: SelectTransform("step", "episode"),
    "Exclude": lambda: ExcludeTransform("episode"),
    "Compose": lambda: Compose(VecNorm(["observation"]), RewardScaling(0.0, 2.0, [("next", "reward")])),
}


@pytest.mark.parametrize("name", MAKERS)
class TestTransforms:
    """Each test of the contract, for each of ours."""

    @pytest.mark.parametrize("test", [test for test in dir(TransformContract) if test.startswith("test_")])
    def test_contract(self, name, test):
        class Contract(TransformContract):
            copies = (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)))

            def make(self):
                return MAKERS[name]()

        getattr(Contract(), test)()


class Casts(TransformContract):
    inverts = True


class TestDTypeCastUndoesItself(Casts):
    def make(self):
        return DTypeCastTransform(torch.float64, torch.float32, in_keys=["observation"], in_keys_inv=["observation"])
