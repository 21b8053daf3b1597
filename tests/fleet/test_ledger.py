"""What clients of a fleet admit stays in the band and their leases, and one side may always go on."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engram.remote.fleet.members import Counts, Ledger, Members, room
from engram.remote.protocol import State
from engram.store.limits import Rules


class Store:
    """What a store does with limits of a fleet: it counts. ``meanwhile`` is called whenever it is asked."""

    def __init__(self, meanwhile=lambda: None):
        self.rows = self.inserts = self.samples = 0
        self.limit, self.fleet, self.begin = (0.0, 0.0, 0, 0), (0, 0), 0.0
        self.meanwhile = meanwhile

    def limit_part(self, limit):
        if limit.fleet > self.fleet[0]:
            self.limit = (limit.ratio, limit.tolerance, limit.min_size, limit.in_flight)
            self.fleet, self.begin = (limit.fleet, limit.stores), limit.level
            self.inserts = self.samples = 0

    def emptied(self):
        self.rows = self.inserts = self.samples = 0
        self.begin, self.fleet = 0.0, (self.fleet[0], 0)

    def state(self):
        self.meanwhile()
        level = self.begin + (self.limit[0] or 1) * self.inserts - (self.samples if self.limit[0] else 0)
        counts = {
            "limit_inserts": self.inserts,
            "limit_samples": self.samples,
            "limit_in_flight": 0,
            "limit_level": level,
        }
        return State(self.rows, 0, {}, self.limit, counts, fleet=self.fleet)


class Shard:
    def __init__(self, number, storage):
        self.number, self.storage, self.lost = number, storage, False


class Shards:
    """Stores, as a client knows them."""

    missing = "skip"
    answers, reaching, check_all_present = Members.answers, Members.reaching, Members.check_all_present

    def __init__(self, stores):
        self.shards = [Shard(k, store) for k, store in enumerate(stores)]

    def present(self):
        return [shard for shard in self.shards if not shard.lost]

    def lose(self, shard, error):
        del error
        shard.lost = True


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Moves when it is told to."""
    now = SimpleNamespace(s=0.0)
    ticks = itertools.count(1_000_000)
    fake = SimpleNamespace(monotonic=lambda: now.s, sleep=lambda _: None, time_ns=lambda: next(ticks) * 1000)
    monkeypatch.setattr("engram.remote.fleet.members.time", fake)
    return now


class Client:
    """Inserts and samples as it is admitted, and knows how many rows of each it was admitted at most that were not counted yet."""

    def __init__(self, stores, home):
        self.stores, self.home = stores, home
        self.ledger = Ledger(Shards(stores))
        self.most = {True: 0.0, False: 0.0}
        self.under_way = []

    def move(self, n, spread, *, samples, later=False):
        """``spread``: to which store each row of a batch goes. ``later``: the stores count it when this client moves again."""
        self.arrive()
        if not self.ledger.admit(n, samples=samples):
            return False
        self.most[samples] = max(self.most[samples], n + self.ledger._leases[samples].rows)
        self.under_way.append((n, spread, samples))
        if not later:
            self.arrive()
        return True

    def arrive(self):
        for n, spread, samples in self.under_way:
            for k in range(n):
                store = self.stores[spread[k % len(spread)] % len(self.stores) if samples else self.home]
                store.samples += samples
                store.inserts += not samples
                store.rows += not samples
            self.ledger.counted(n, samples=samples)
        self.under_way.clear()


steps = st.tuples(
    st.integers(0, 3),
    st.booleans(),
    st.integers(1, 40),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.booleans(),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ratio=st.sampled_from([0.25, 1, 2.5, 8]),
    min_size=st.integers(1, 60),
    tolerance=st.sampled_from([0, 0.1, 1, 4, 30]),
    work=st.lists(steps, min_size=1, max_size=80),
    between=st.lists(st.none() | steps, max_size=60),
    late=st.booleans(),
)
def test_any_interleaving_stays_in_the_band_and_the_leases(clock, ratio, min_size, tolerance, work, between, late):
    """Of four clients of three stores. Some do their work while another one looks at the stores, one after the other."""
    amid = iter(between)
    busy = {0, 1, 2, 3}

    def meanwhile():
        step = next(amid, None)
        if step is not None and step[0] not in busy:
            do(step)

    def do(step):
        number, samples, n, spread, later = step
        busy.add(number)
        try:
            return clients[number].move(n, spread, samples=samples, later=later)
        finally:
            busy.discard(number)
            check()

    def check():
        level = centre + sum(ratio * it.inserts - it.samples for it in stores) - (centre - first)
        top = centre + max(slack, ratio * largest) + ratio * sum(it.most[False] for it in clients)
        bottom = centre - max(slack, largest) - sum(it.most[True] for it in clients)
        assert level <= top
        assert level >= bottom or level >= first  # it begins below

    stores = [Store(meanwhile) for _ in range(3)]
    stores[0].rows = min_size // 2
    centre, slack, largest = ratio * min_size, tolerance * ratio * min_size, 40
    first = ratio * min(min_size // 2, min_size)
    clients = [Client(stores, home=k % 3) for k in range(4)]
    clients[0].ledger.set(Rules(ratio, tolerance, min_size))
    busy.clear()
    for step in work:
        if late:
            clock.s += 0.3
        moved = do(step)
        if (
            not moved and next(amid, None) is None
        ):  # nothing else happens: the other side goes on, whoever asks, whatever its size
            for client in clients:
                client.arrive()
            number, samples, n, spread, _ = step
            assert do((number, samples, n, spread, False)) or do(((number + 1) % 4, not samples, 41 - n, spread, False))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=st.builds(
        Rules,
        st.sampled_from([0.0, 0.5, 3.0]),
        st.sampled_from([0.0, 0.2, 2.0]),
        st.integers(0, 50),
        st.sampled_from([0, 90]),
    ),
    level=st.integers(-300, 600),
    live=st.integers(0, 100),
    in_flight=st.integers(0, 90),
    n=st.integers(1, 40),
    b=st.integers(1, 300),
)
def test_never_are_both_sides_refused(rules, level, live, in_flight, n, b):
    counts = Counts(rules, 1, float(level), live, in_flight if rules.in_flight else 0)
    inserts, samples = room(counts, n, samples=False), room(counts, b, samples=True)
    assert inserts >= n or inserts == 0
    assert samples >= b or samples == 0
    if not inserts and not samples:
        assert rules.in_flight
        assert counts.in_flight + n > rules.in_flight  # a full queue, from which the level admits no sample
        assert rules.ratio


def test_a_client_that_dies_takes_no_budget_along():
    stores = [Store(), Store()]
    writer, dying, reader = (Client(stores, home=k % 2) for k in range(3))
    writer.ledger.set(Rules(1.0, 8.0, 100))
    while writer.move(1, [0], samples=False):
        pass
    assert sum(it.inserts for it in stores) == 900  # to the edge, not a row more
    assert dying.move(1, [0, 1], samples=True)
    assert dying.ledger._leases[True].rows >= 60  # and then it is gone
    drawn = 1
    while reader.move(1, [0, 1], samples=True):
        drawn += 1
    assert drawn == 1600


def test_a_change_holds_for_all_when_leases_are_over(clock):
    stores = [Store(), Store()]
    one, other = (Client(stores, home=k) for k in range(2))
    one.ledger.set(Rules(1.0, 1.0, 1000))
    assert other.move(100, [0], samples=False)
    one.ledger.set(Rules(1.0, 0.0, 10))
    assert [it.limit for it in stores] == [(1.0, 0.0, 10, 0)] * 2
    clock.s += 1
    assert other.move(1, [0], samples=False)
    assert not other.move(1, [0], samples=False)
    assert other.ledger.limit == (1.0, 0.0, 10, 0)
    one.ledger.set(Rules())
    clock.s += 1
    assert other.move(5000, [0], samples=False)
    assert [any(it.limit) for it in stores] == [False, False]


def test_limits_that_one_store_has_lost_begin_again_in_all(clock):
    stores = [Store(), Store()]
    client = Client(stores, home=0)
    client.ledger.set(Rules(2.0, 0.0, 10))
    assert client.move(10, [0], samples=False)
    for again in ("lost with its memory", "emptied"):
        before = stores[0].fleet
        if again == "emptied":
            stores[1].emptied()
        else:
            stores[1] = client.ledger._members.shards[1].storage = Store()
        clock.s += 1
        assert client.move(8, [0], samples=True)
        assert stores[0].fleet == stores[1].fleet > before
        assert stores[1].limit == stores[0].limit == (2.0, 0.0, 10, 0)
        assert [it.inserts for it in stores] == [0, 0]


def test_a_store_that_is_gone_still_counts_for_those_who_knew_it(clock):
    stores = [Store(), Store()]
    client = Client(stores, home=0)
    client.ledger.set(Rules(1.0, 1.0, 10))
    assert client.move(20, [0], samples=False)
    shards = client.ledger._members.shards
    assert client.ledger.limit_counts()["limit_level"] == 20
    shards[0].lost = True
    clock.s += 1
    assert not client.move(1, [0], samples=False)
    clock.s += 100  # it has counted nothing since
    assert not client.move(1, [0], samples=False)
    assert client.ledger.limit_counts()["limit_stores_unknown"] == 0
    new = Ledger(Shards(stores[1:]))
    assert not new.admit(1, samples=True)  # it cannot know
    assert new.limit_counts()["limit_stores_unknown"] == 1
    new.set(Rules(1.0, 1.0, 10))  # those that are there begin again
    assert new.admit(1, samples=False)
    assert new.limit_counts()["limit_stores_unknown"] == 0
    clock.s += 1
    client.ledger.admit(1, samples=False)
    shards[0].lost = False
    clock.s += 1
    assert client.ledger.admit(1, samples=False)  # and it does so when it is back
    assert stores[0].fleet == stores[1].fleet
    assert stores[0].fleet[1] == 2


def test_a_store_with_limits_of_its_own_is_named():
    stores = [Store(), Store()]
    ledger = Ledger(Shards(stores))
    stores[1].limit = (0.0, 0.0, 5, 0)
    with pytest.raises(RuntimeError, match="limits of its own"):
        ledger.admit(1, samples=True)


def test_a_store_that_was_gone_before_it_was_ever_asked_is_one_that_is_not_known(clock):
    stores = [Store(), Store()]
    Ledger(Shards(stores)).set(Rules(1.0, 1.0, 10))
    shards = Shards(stores)
    shards.shards[1].lost = True
    late = Ledger(shards)
    assert late.limit == (1.0, 1.0, 10, 0)
    assert late.limit_counts()["limit_stores_unknown"] == 1
    assert not late.admit(1, samples=False)
    shards.shards[1].lost = False
    assert late.admit(1, samples=False)
