"""Locks in a forked child."""

from tests import fresh


def test_a_child_forked_by_a_writer_goes_on_writing():
    """Whoever forks while a storage is his gives it back in both processes; what another thread held is free."""
    program = fresh.start(
        """
        import os, threading, torch
        from tensordict import TensorDict
        from engram import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        from engram._support import fork as _fork

        class Forking(TensorDictMaxValueWriter):
            child = None

            def place(self, *arguments):
                plan = super().place(*arguments)
                if self.child is None:
                    self.child = os.fork()
                return plan

        others, held, done = [_fork.lock(), _fork.rlock()], threading.Event(), threading.Event()

        def hold():
            with others[0], others[1]:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        writer = Forking("x")
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
        rb.extend(TensorDict({"x": torch.arange(6.0)}, [6]))
        rb.add(TensorDict({"x": torch.tensor(9.0)}))
        assert rb["x"].sum() == 3 + 4 + 5 + 9
        if writer.child == 0:
            assert all(lock.acquire(timeout=60) for lock in others)
            os._exit(0)
        done.set()
        thread.join()
        assert os.waitpid(writer.child, 0)[1] == 0
        """
    )
    assert program.wait() == 0, program.err


def test_closed_buffers_keep_no_child_from_going_on():
    out = fresh.run(
        """
        import os, torch, warnings
        from engram import LazyTensorStorage, ListStorage, ReplayBuffer

        closed = [ReplayBuffer(storage=storage(5)) for storage in (LazyTensorStorage, ListStorage)]
        rb = ReplayBuffer(storage=LazyTensorStorage(5))
        for one in (*closed, rb):
            one.extend(torch.arange(3))
        for one in closed:
            one.close()
        pid = os.fork()
        if pid == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rb.extend(torch.arange(2))
            print(len(caught), "is not shared" in str(caught[0].message), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        """
    )
    assert out.splitlines() == ["1 True"]


def test_what_cannot_go_on_in_a_child_keeps_no_other_thing_from_it():
    """Python says what was raised, such as by a store whose files are damaged."""
    program = fresh.start(
        """
        import os
        from engram._support import fork as _fork

        class Thing:
            def __init__(self, fails):
                self.fails, self.told = fails, False

            def after_fork(self):
                self.told = True
                if self.fails:
                    raise RuntimeError("no going on")

        things = [_fork.registered(Thing(number % 2 == 1), uses_others=number > 9) for number in range(20)]
        pid = os.fork()
        if pid == 0:
            os._exit(sum(not thing.told for thing in things))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    )
    assert program.wait() == 0, program.err
    assert "no going on" in program.err
