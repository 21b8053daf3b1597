"""Steps of several lanes in one write: in which order they come, or which field says the lane of each."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engram import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from engram.errors import RowError

LENGTH = 6


def stored(rb, lanes):
    """What each lane holds, oldest first."""
    held = {}
    for lane in range(lanes):
        extent = rb.storage.extent()
        filled, seam = extent.filled[lane], extent.seam[lane] - lane * LENGTH
        places = [(seam - back) % LENGTH for back in range(filled, 0, -1)]
        held[lane] = [int(rb[lane * LENGTH + place]["x"]) for place in places]
    return held


cases = st.fixed_dictionaries(
    {
        "lanes": st.integers(2, 5),
        "named": st.sampled_from(["none", "each", "some", "one", "handle"]),
        "layout": st.sampled_from(["time_first", "lane_first"]),
        "steps": st.lists(st.integers(1, 8), min_size=1, max_size=4),
        "form": st.sampled_from(["dict", "td", "td [.., ..]", "list", "numbers"]),
        "order": st.randoms(use_true_random=False),
    }
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_every_step_reaches_its_lane_in_order(case):
    n, first = case["lanes"], case["layout"] == "time_first"
    rb = ReplayBuffer(storage=LazyTensorStorage(n * LENGTH, lanes=n))
    some = case["order"].sample(range(n), case["order"].randint(1, n))
    if case["named"] == "handle":
        rb.on_lane(1)
    lane = {"none": None, "each": "each", "some": some, "one": 1, "handle": None}[case["named"]]
    names = {"none": range(n), "each": range(n), "some": some, "one": [1], "handle": [1]}[case["named"]]
    expected, x = {k: [] for k in range(n)}, 0
    for steps in case["steps"]:
        table = {}
        for step in range(steps):  # as environments make them
            for name in names:
                x += 1
                expected[name].append(x)
                table[step, name] = x
        pairs = (
            [(s, k) for s in range(steps) for k in names] if first else [(s, k) for k in names for s in range(steps)]
        )
        values = [table[pair] for pair in pairs]
        data = {
            "dict": {"x": np.array(values)},
            "td": TensorDict({"x": torch.tensor(values)}, [len(values)]),
            "td [.., ..]": TensorDict({"x": torch.tensor(values)}, [len(values)]).reshape(
                *((steps, len(names)) if first else (len(names), steps))
            ),
            "list": [{"x": value} for value in values],
            "numbers": {"x": values},
        }[case["form"]]
        rows = rb.extend(data, lane=lane, layout=case["layout"])
        assert rows.shape == (len(values),)
        survivors = {pair: int(row) for pair, row in zip(pairs, rows, strict=True)}
        for (_, name), row in survivors.items():
            assert row // LENGTH == name
    assert stored(rb, n) == {k: expected[k][-LENGTH:] for k in range(n)}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_a_collectors_batch_finds_its_lanes(n, lengths, order, prioritized):
    storage = LazyTensorStorage(n * LENGTH, lanes=n)
    kind = TensorDictPrioritizedReplayBuffer if prioritized else TensorDictReplayBuffer
    rb = kind(storage=storage, **({"alpha": 1.0, "beta": 1.0} if prioritized else {}))
    expected, x = {k: [] for k in range(n)}, 0
    for length in lengths:
        ids = order.sample(range(n), n)  # in any order
        values = torch.zeros(n, length, dtype=torch.int64)
        for i, env in enumerate(ids):
            for t in range(length):
                x += 1
                values[i, t] = x
                expected[env].append(x)
        env_ids = torch.tensor(ids).unsqueeze(1).expand(n, length)
        td = TensorDict({"x": values, "td_error": values.float(), "collector": {"env_id": env_ids}}, [n, length])
        index = rb.extend(td)
        assert index.shape == (n * length,)
    assert stored(rb, n) == {k: expected[k][-LENGTH:] for k in range(n)}
    assert bool((rb[:]["collector", "env_id"] == torch.arange(len(rb)) // LENGTH).all()) or len(rb) < n * LENGTH


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dims", [1, 2])
def test_a_field_of_a_dict_names_the_lanes(wide, dims):
    rb = ReplayBuffer(storage=LazyTensorStorage(3 * LENGTH, lanes=3))
    env, x = np.array([[2, 2], [0, 0]], np.uint8), np.array([[1, 2], [3, 4]])
    if dims == 1:
        env, x = env.reshape(-1), x.reshape(-1)
    obs = np.stack([x, x], -1) if wide else x
    rb.extend({"x": x, "info": {"env": env}, "obs": obs, "t": torch.from_numpy(x)}, lane_key=("info", "env"))
    assert stored(rb, 3) == {0: [3, 4], 1: [], 2: [1, 2]}
    assert rb[0]["obs"].tolist() == ([3, 3] if wide else 3)


@pytest.mark.parametrize("shape", [[3], [3, 1]])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4))
def test_collectors_name_the_environment_whatever_the_size_of_a_batch(shape, batches):
    """Also of as many rows as there are lanes: of one environment, of some, or in another order."""
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3 * LENGTH, lanes=3))
    expected, x = {0: [], 1: [], 2: []}, 0
    for ids in batches:
        numbers = range(x, x := x + len(ids))
        for number, lane in zip(numbers, ids, strict=True):
            expected[lane].append(number)
        env_id = torch.tensor(ids).reshape(-1, *shape[1:])
        rb.extend(TensorDict({"x": torch.tensor(numbers), "collector": {"env_id": env_id}}, [len(ids)]))
    assert stored(rb, 3) == {lane: steps[-LENGTH:] for lane, steps in expected.items()}


@dataclass
class Step:
    x: object
    where: object


Pair = namedtuple("Pair", ["x", "where"])


@pytest.mark.parametrize("shape", [[], [1]])
@pytest.mark.parametrize("form", ["dict", "dataclass", "named tuple", "TensorDict", "tuple"])
@pytest.mark.parametrize("rows", ["a batch", "a list"])
def test_a_field_of_any_rows_names_the_lanes(form, rows, shape):
    lanes = [2, 0, 0, 2, 1]
    kind = {"dict": dict, "dataclass": Step, "named tuple": Pair, "TensorDict": lambda **row: TensorDict(row)}
    kind = {**kind, "tuple": lambda x, where: (x, where)}[form]

    def of(x, where):
        row = {"x": torch.as_tensor(x), "where": {"lane": torch.as_tensor(where)}}
        return kind(**row) if form != "TensorDict" else TensorDict(row, [5] if rows == "a batch" else [])

    where = torch.tensor(lanes).reshape(5, *shape)
    data = of(torch.arange(5), where) if rows == "a batch" else [of(x, where[x]) for x in range(5)]
    rb = ReplayBuffer(storage=LazyTensorStorage(3 * LENGTH, lanes=3))
    with pytest.raises(KeyError, match="lane_key: expected a field of the data, got 'elsewhere'"):
        rb.extend(data, lane_key="elsewhere")
    if rows == "a batch" and shape and form != "TensorDict":
        with pytest.raises(RuntimeError, match=r"expected \[5, 1, \.\.\.\] in every leaf"):
            rb.extend(data, lane_key=("1" if form == "tuple" else "where", "lane"))
        return  # only TensorDicts say how many rows they have
    rb.extend(data, lane_key=("1" if form == "tuple" else "where", "lane"))
    held = {
        k: [
            row.x if form in ("dataclass", "named tuple") else row[0 if form == "tuple" else "x"]
            for row in map(rb.__getitem__, at)
        ]
        for k, at in {0: [0, 1], 1: [LENGTH], 2: [2 * LENGTH, 2 * LENGTH + 1]}.items()
    }
    assert {k: [int(x) for x in xs] for k, xs in held.items()} == {0: [1, 2], 1: [4], 2: [0, 3]}


def test_rows_with_a_shape_of_their_own_stay_rows():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4, lanes=2))
    window = TensorDict({"x": torch.zeros(2, 3), "collector": {"env_id": torch.zeros(2, 3, dtype=torch.int64)}}, [2, 3])
    rb.extend(window, lane="each")
    rb.extend(window)
    assert rb[:]["x"].shape == (4, 3)


X = {"x": np.arange(8)}
TD = TensorDict({"x": torch.zeros(2, 4), "env": torch.zeros(2, 4, dtype=torch.int64)}, [2, 4])
REFUSED = {
    "no multiple": (
        (X, {"layout": "time_first"}),
        RuntimeError,
        r"equally many steps of 3 lanes, k · 3 rows .*got 8\. .*lane=",
    ),
    "of two": (
        (X, {"layout": "lane_first", "lane": [0, 1, 2]}),
        RuntimeError,
        "layout='lane_first': expected equally many",
    ),
    "word": ((X, {"layout": "time"}), ValueError, "layout: expected 'time_first' or 'lane_first', got 'time'"),
    "both": ((X, {"layout": "time_first", "lane_key": "x"}), ValueError, "lane_key: expected no lane= and no layout="),
    "lane too": ((X, {"lane": 0, "lane_key": "x"}), ValueError, "lane_key: expected no lane= and no layout="),
    "no such field": ((X, {"lane_key": "env"}), KeyError, "lane_key: expected a field of the data, got 'env'"),
    "no key": ((X, {"lane_key": 1.5}), TypeError, "lane_key: expected a string or a tuple of strings, got 1.5"),
    "outside": ((X, {"lane_key": "x"}), RowError, r"'x' names the lanes: .*\[0, 3\).* Name them with lane="),
    "floats": (({"x": np.zeros(8)}, {"lane_key": "x"}), TypeError, "lane: expected ints"),
    "of another shape": (
        ({"x": np.zeros((2, 2, 2), int)}, {"lane_key": "x"}),
        RuntimeError,
        r"a lane for each row, \[n\] or \[n, T\]",
    ),
    "transposed": ((TD, {"layout": "time_first", "lane": [0, 1]}), RuntimeError, r"TensorDict \[T, 2\], got \[2, 4\]"),
    "no lane": ((X, {"layout": "time_first", "lane": [0, 3]}), RowError, "lane: expected lanes in"),
    "unnamed": (
        (X, {}),
        RuntimeError,
        'expected 3 rows, one for each lane.*got 8.*layout="time_first" or "lane_first"',
    ),
}


@pytest.mark.parametrize(("call", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_remedy(call, error, says):
    rb = ReplayBuffer(storage=LazyTensorStorage(3 * LENGTH, lanes=3))
    with pytest.raises(error, match=f"{says}"):
        rb.extend(call[0], **call[1])
    assert not rb.storage.initialized


@pytest.mark.parametrize(("layout", "shape"), [("time_first", (6, 3)), ("lane_first", (3, 5))])
def test_steps_and_lanes_that_are_not_flattened_are_refused(layout, shape):
    """They would be stored as other rows: six of three steps each, say."""
    rb = ReplayBuffer(storage=LazyTensorStorage(30, lanes=3))
    data = {"obs": torch.zeros(*shape, 4), "t": np.arange(shape[0] * shape[1]).reshape(shape)}
    with pytest.raises(
        RuntimeError, match=rf"layout='{layout}': expected rows.*\[{shape[0]}, {shape[1]}\].*Flatten them"
    ):
        rb.extend(data, layout=layout)
    assert not rb.storage.initialized
    flat = {"obs": torch.zeros(15, 4), "t": np.arange(15)}
    assert rb.extend(flat, layout=layout).tolist() == [
        10 * (i % 3) + i // 3 if layout == "time_first" else 10 * (i // 5) + i % 5 for i in range(15)
    ]


def test_storages_of_several_dimensions_have_their_own_layout():
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    with pytest.raises(RuntimeError, match=r"layout: expected ndim=1: .*\[\*columns, T, ...\]"):
        rb.extend({"x": torch.zeros(2, 3)}, layout="time_first")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_lanes_of_every_dtype_of_ints(dtype):
    rb = ReplayBuffer(storage=LazyTensorStorage(9, lanes=3))
    env = torch.tensor([2, 0, 2]).to(dtype)
    assert rb.extend({"x": torch.arange(3), "env": env}, lane_key="env").tolist() == [6, 0, 7]
    assert rb.extend({"x": torch.arange(3), "env": env}, lane=env).tolist() == [8, 1, 6]
    with pytest.raises(RowError, match=r"lanes in \[0, 3\), got 3\."):
        rb.extend({"x": torch.arange(9), "env": torch.tensor([0] * 8 + [3]).to(dtype)}, lane_key="env")


@pytest.mark.parametrize("env", [[[0], [1]], [[0, 1], [1, 0]]])
def test_lanes_in_more_dimensions_than_the_rows(env):
    rb = ReplayBuffer(storage=LazyTensorStorage(9, lanes=3))
    with pytest.raises(
        RuntimeError, match=r"lane_key: expected \[2, [12], \.\.\.\] in every leaf, .*got \[2\]\. Flatten"
    ):
        rb.extend({"x": torch.arange(2), "env": torch.tensor(env)}, lane_key="env")
    assert len(rb) == 0
