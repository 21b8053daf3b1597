"""The replay buffer: it wires storage, sampler, writer and transforms together, and decides nothing itself."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, SupportsIndex, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from engram import inspect, storages, writers
from engram._support import fork, overrides, unsupported, words
from engram._support.closing import end
from engram.buffer import base, connecting, following, growing, on_device, read_path, row_access, window_marks
from engram.buffer import configuration as conf
from engram.buffer.field_updates import ConditionalUpdateResult, add_field, submit_update_if_present
from engram.buffer.lanes import Lane, Lanes, Layout
from engram.buffer.output import Output, Source, View, moved, target_of
from engram.buffer.prefetching import Prefetching
from engram.buffer.ragged_batches import BatchForm, LayoutOfCall, SampleArguments, Tokens
from engram.buffer.recipe import Recipe, open_buffer, open_or_create, register
from engram.buffer.saving import Saving
from engram.buffer.services import Service, as_remote, client, clients, deployed, service_in
from engram.buffer.wiring import component
from engram.buffer.write_path import Appender, WritePath, rows_of
from engram.env import Examples, Infos, Notes, Target, record
from engram.inspect.plots import Plots
from engram.samplers._base import DeclaredSampler, refuse_batch
from engram.store.limits import WAIT_S, Limit, checked_timeout
from engram.types import Batch, Device, Sampler, Size, StrPath, Told, Wait, Write, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from engram._support.progress import OnProgress
    from engram.env.recording import Appending, Names
    from engram.remote.shards import ShardSavers
    from engram.saved.rows import Roles
    from engram.storages import GivenStorage, Storage

E = TypeVar("E")
shows: base.Shows[ReplayBuffer[Any]] = base.Shows()


class ReplayBuffer(base.Shown, growing.Grows, base.Iterates[Batch]):
    """Rows in, batches out.

    Args:
        size: rows; must equal the storage's ``max_size`` if both are given, and bounds a ``ListStorage`` that has none.
        storage: where the rows are: a storage or a class of one. Default: of ``size or 1000`` rows, a
            :class:`LazyTensorStorage` if the first rows are dicts of tensors, arrays and numbers, else a :class:`ListStorage`.
        sampler: which rows a batch has: a sampler or a class of one. Default :class:`RandomSampler`.
        writer: where new rows go: a writer or a class of one. Default :class:`RoundRobinWriter`.
        collate_fn: applied to every batch: tensor storages hand it the gathered batch, list storages the list of items.
            Default: nothing; list storages stack tensors and TensorDicts.
        transform: applied to batches after collating (``forward``) and to data before writing (``inv``): see :class:`Compose`.
        transform_factory: makes the transform, without arguments, in place of ``transform``: where buffers are made of a shared
            description, each needs one of its own. Called once; with it ``delayed_init`` is True, unless False is given.
        batch_size: default of :meth:`sample`; needed to iterate and to prefetch.
        prefetch: batches asked for ahead of the one that :meth:`sample` returns: see docs/prefetch.md. Default, 0: none.
        pin_memory: batches lie in page-locked memory, every CPU tensor of them and of ``info``: see docs/pinning.md. Without
            an accelerator one warning, and ordinary memory.
        generator: a CPU ``torch.Generator`` that drives every draw. Default: torch's, at the moment of each draw.
        output: the form of batches. ``"torch"``: that of the rows. ``"numpy"``: nested dicts of arrays, for JAX and the like, without a
            copy; ``info`` has arrays, too. ``"namedtuple"``: attributes, ``batch.obs``, ``batch.next.reward``; a name that cannot be one is
            a ``ValueError`` of :meth:`sample`. Tuples and single tensors stay such. Rows by number, ``rb[i]``, stay as they are.
        shared: as :meth:`share`.
        delayed_init: make storage, sampler, writer and transform at the first use of the buffer, in the process that uses it: for those
            that are given as callables. What they raise is raised then. ``len`` is 0 before, and :meth:`stats` and ``repr`` say so.
        compilable: for a buffer that a function under ``torch.compile`` uses: each :meth:`add`, :meth:`extend`, :meth:`sample` and update
            of priorities or fields is one graph break, runs as it does elsewhere, and is never recompiled. So it is from then on if a
            storage or writer that was made with ``compilable=True`` is given, here or later.
        remover: which rows go when the store is full: :class:`LowestPriority`, another :class:`Remover`. Default: the oldest.
        sample_unit: what a drawn row stands for in a batch: :class:`Sequence`, a window around it, or a :class:`SampleUnit` of your own.
            Default, as :class:`Transition`: itself.
        consume_after_n_samples: after so many draws a row is used up: short for ``sampler=ConsumingSampler(n)``. With a
            :class:`PromptGroupSampler` short for its ``max_uses=n``.
        service_backend: ``"ray"``: an actor of Ray keeps the rows, as for :class:`RayReplayBuffer`, which has the other arguments of it:
            ``transport``, ``shards``, ``placement``, ``name``; ``ray_init_config`` and ``remote_config`` in a dict
            ``service_backend_options``.

    Raises:
        TypeError: a component of the wrong kind, or an argument of TorchRL's that is not supported yet (named); ``transform`` and
            ``transform_factory`` both.
        ValueError: ``size`` and the storage's ``max_size`` differ; ``batch_size`` below 1; ``prefetch`` below 0, or without
                ``batch_size``; another ``output``.

    >>> import torch
    >>> from engram import LazyTensorStorage, ReplayBuffer
    >>> rb = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=32)
    >>> rb.extend({"obs": torch.randn(100, 4), "reward": torch.zeros(100, 1)}).shape
    torch.Size([100])
    >>> rb.sample()["obs"].shape
    torch.Size([32, 4])
    """

    _default_writer: Callable[[], object] = writers.RoundRobinWriter
    #: Entry that brings a row's priority along, for TensorDict buffers.
    _priority_key: str | None = None
    _read_path = read_path.ReadPath
    _write_path = WritePath
    _row_access = row_access.RowAccess
    #: Whether it always has priorities.
    _prioritized = False
    #: Whether :meth:`close` was called.
    closed = False
    _following = following.NotFollowing()
    _service: Service = Service()

    def __init__(
        self,
        size: int | None = None,
        *,
        storage: GivenStorage | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], object] | None = None,
        transform: object = None,
        transform_factory: Callable[[], object] | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        pin_memory: bool | None = False,
        generator: torch.Generator | None = None,
        output: Output = "torch",
        **torchrl: Unpack[conf.Arguments],
    ) -> None:
        call, rest = type(self).__name__, cast("dict[str, Any]", torchrl)
        if rest.pop("compilable", None):
            conf.leave_untraced(self)
        service = service_in(rest) if rest else None
        more = {name: rest.pop(name) for name in conf.OF_COMPONENTS if name in rest}
        if rest:
            unsupported.reject_unsupported(call, rest, conf.NOT_YET, type(self))
        made_of = storage, size, sampler, writer, collate_fn, transform, transform_factory
        read = batch_size, prefetch, pin_memory, generator, output
        configuration = conf.Configuration(call, self._default_writer, self._priority_key, *made_of, *read, **more)
        self._settings = conf.Settings(call, batch_size, prefetch, self._priority_key, output, configuration)
        if service is not None:
            self.__setstate__(deployed(type(self), vars(configuration), **service))
        elif configuration.is_made_later:
            conf.make_at_first_use(self)
        else:
            self.assemble()

    def assemble(self, lane: int | None = None) -> None:
        """Make the components, if ``delayed_init`` has left that to the first use, and the parts around them.

        ``lane``: the one that was named.

        The first use does it, and programs need not.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=lambda: LazyTensorStorage(10), delayed_init=True)
        >>> before = rb.initialized
        >>> rb.assemble()
        >>> before, rb.initialized
        (False, True)
        """
        settings, unmade = self._settings, self._settings.unmade
        if unmade is not None:
            self._wiring = unmade.wiring()
        wiring = self._wiring
        self._recipe, self._lanes = Recipe(wiring, settings), Lanes(wiring, lane)
        reading = self._read_path(wiring)
        rows, saving, ahead = (
            connecting.CONNECTED if wiring.storage.traits.is_remote else (self._row_access, Saving, Prefetching)
        )
        self._prefetching = ahead(wiring, settings, reading) if settings.prefetch else None
        source = reading if self._prefetching is None else self._prefetching
        self._reading: Source = source if settings.output == "torch" else View(settings.output, source)
        self._writing = self._write_path(wiring, settings, self._lanes, self._recipe, self._prefetching)
        self._rows = rows(wiring, settings, reading, self._prefetching)
        self._saving = saving(wiring, settings, self._lanes, reading, self._prefetching, self._recipe)
        if unmade is not None:
            settings.unmade = None
            wiring.storage.attach(self)
            if "_wiring" in vars(type(self)):
                object.__setattr__(self, "__class__", type(self).__base__)  # it has its parts
            if unmade.shared:
                self.share()
        if wiring.untraced:
            conf.leave_untraced(self)

    # ---- writing -------------------------------------------------------------------------------------------------------

    def add(self, data: object, *, lane: int | None = None, timeout: float | None = WAIT_S) -> Any:
        """Write one row.

        Args:
            data: a nested dict, tuple or dataclass of NumPy arrays, tensors, numbers or lists of numbers, without a batch dimension;
                or a tensor, TensorDict or tensorclass; with a ``ListStorage`` any object. The first row fixes fields, dtypes and shapes:
                a Python float becomes float32, an int int64, a bool bool; arrays and tensors keep their dtype. Later a number, also a
                NumPy scalar, becomes the field's dtype, if that holds it; arrays must have it, unless ``dtypes`` of the storage names
                the field. Copied.
            lane: the ring to append to, where there are several; default the handle's (:meth:`on_lane`).
            timeout: seconds to wait for a :meth:`limit` of the store; 0: try once; None: for ever.

        Returns:
            The row, an int; None if the writer rejected it. With ``ndim > 1``, int64 ``[rows written, ndim]``. An empty index
            if a write transform held the row back.

        Raises:
            KeyError, RuntimeError, TypeError: fields, shapes or dtypes, or kinds differ from the first row's; or an entry is no
                tensor, such as a string, for which there is ``ListStorage``. Names the field. Nothing is written.
            RowError: no such lane. RuntimeError: several lanes, of which none was named.
            ValueError: a ``TensorDictReplayBuffer`` is given no TensorDict, or one whose ``priority_key`` holds no priority
                (``PriorityError``). Nothing is written.
            RateLimited: the limits of the store did not admit the row in time. Nothing is written.
            OSError: first write to a full disk.

        Cost: O(bytes of the row). Releases the GIL; may be called from several threads.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.add({"obs": [0.0, 1.0], "action": 1, "done": False})
        0
        >>> len(rb)
        1
        """
        return self._writing.add(data, lane, timeout if timeout is WAIT_S else checked_timeout(timeout, "add"))

    def extend(
        self,
        data: object,
        *,
        lane: Lane = None,
        update_priority: bool | None = None,
        layout: Layout = None,
        lane_key: str | tuple[str, ...] | None = None,
        timeout: float | None = WAIT_S,
    ) -> Tensor:
        """Write a batch of rows.

        Args:
            data: as for :meth:`add`, every leaf ``[n, ...]``; or a list of ``n`` rows, which are stacked. With ``ndim > 1``
                ``[*columns, T, ...]``. Copied.
            lane: an int; or a lane per row (order is kept within each), as a list, tuple, range, array or tensor; or ``"each"``: of as
                many rows as there are lanes, row ``i`` to lane ``i``. Default the handle's; of several lanes, of which it named none,
                ``"each"``.
            update_priority: only for prioritized TensorDict buffers.
            layout: of ``k`` steps of each lane, ``k · n`` rows in all, what comes first: ``"time_first"``: the step of every lane, then
                the next; ``"lane_first"``: all steps of a lane, then those of the next. A TensorDict may be ``[T, n]`` or ``[n, T]``.
                With ``lane=[…]`` of those lanes, in this order.
            lane_key: a field of the data that says the lane of each row, ints ``[n]``, or ``[n, T]``: then every leaf has these two
                dimensions, and ``n · T`` rows are written. Default, where no lane is named: ``("collector", "env_id")`` of a
                TensorDict, which numbers environments: each keeps the lane of its newest row. A new one has the lane of its number,
                or, if as many are new as lanes are free, the next free one; others are refused. Processes that begin with an empty
                store at the same moment, and connected ones, cannot know that: number environments as the lanes there.
            timeout: as for :meth:`add`. The rows are admitted together.

        Returns:
            int64 ``[n]`` rows, none for no rows; of more rows than fit, the newest stay and rows repeat. -1 for rows that the writer
            rejected. With ``ndim > 1`` ``[rows written, ndim]`` in storage order.

        Raises:
            KeyError, RuntimeError, TypeError: as :meth:`add`; one row without batch dimension.
            RowError: no such lane, or none for an environment. RuntimeError: several lanes, of which none was named, and another number
                of rows than of lanes; with ``layout`` no multiple of it. ValueError: another ``layout``, or ``lane_key`` beside another
                way to name lanes.
            NotImplementedError: ``update_priority``.
            RateLimited: as :meth:`add`. ValueError: no limit of the store could ever admit so many rows at a time.

        Cost: O(bytes). Contiguous data is copied with one memcpy per field and chunk. Releases the GIL.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.extend({"obs": torch.zeros(3, 4), "done": [False, False, True]}).tolist()
        [0, 1, 2]
        """
        if update_priority is not None:
            raise NotImplementedError("extend: update_priority is for prioritized TensorDict buffers.")
        wait = timeout if timeout is WAIT_S else checked_timeout(timeout, "extend")
        return self._writing.extend(data, lane, layout, lane_key, wait)

    listens: bool = shows(lambda self: self._wiring.of_sampler.listens, "Whether the sampler wants to hear of writes.")

    def appender(self, lane: Lane = None) -> Appender:
        """Name lanes once, for the tightest loops: ``a = rb.appender(lane=3)``, then ``a.add(obs=…, action=…)`` for every step.

        Args:
            lane: an int; for ``extend`` also one per row, or ``"each"``. Default: as for :meth:`add` and :meth:`extend`.

        Raises:
            RowError: no such lane. TypeError: no int, and no ints.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> add = rb.appender().add
        >>> for step in range(5):
        ...     _ = add(obs=[0.0, 1.0], action=step % 2)
        >>> len(rb)
        5
        """
        fixed = lane if lane is None or isinstance(lane, str) else self._lanes.checked(lane, "appender")
        return Appender(self.add, self.extend, fixed.clone() if isinstance(fixed, Tensor) else fixed)

    def on_lane(self, lane: int) -> Self:
        """Make ``lane`` this handle's lane for all later writes. Returns the buffer.

        Until then a handle has none, where there are several lanes: its writes name one, or write a row to each. Copies and saved
        states keep it.

        Raises ``RowError``: no such lane.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100, lanes=2), batch_size=4)
        >>> rb.on_lane(1).add({"obs": torch.zeros(3)})
        50
        """
        self._lanes.default = self._lanes.checked(lane, "on_lane")
        return self

    lanes: int = shows(lambda self: self._wiring.storage.lanes, "Rings of consecutive rows in the storage: an int.")

    def observe(self, write: Write | None, data: object) -> None:
        """Called by the storage after a write through any buffer or writer; tells the sampler if it listens.

        >>> import torch
        >>> from engram import LazyTensorStorage, RandomSampler, ReplayBuffer
        >>> class Heard(RandomSampler):
        ...     def observe(self, write, data):
        ...         print("emptied" if write is None else f"wrote {write.rows.tolist()}")
        >>> storage = LazyTensorStorage(10)
        >>> rb, other = ReplayBuffer(storage=storage, sampler=Heard()), ReplayBuffer(storage=storage)
        >>> _ = other.extend(torch.arange(2))  # the storage calls rb.observe
        wrote [0, 1]
        """
        wiring = self._wiring
        if write is not None:
            self._recipe.note_if_absent()
        if write is None or wiring.of_sampler.listens:
            wiring.source.observe(write, data)

    def empty(self, empty_write_count: bool = True, *, lane: Lane = None) -> None:
        """Forget all rows; memory stays allocated. ``empty_write_count=False`` keeps :attr:`write_count`.

        ``lane=``, an int, several ints or ``"each"``: forget the rows of these lanes only, as :func:`remove` does with each of them.
        The lane's next row goes where it would have gone, and no window or return reaches back over the gap. Counts stay.

        Until the first batch is drawn, later rows may have other fields, shapes or dtypes; memory is then allocated again. This needs
        that no other process has the store open. Programs use it to allocate with fake rows before workers start.

        A process that is killed in here leaves the rest to the others, who find it within half a second: a priority that one of
        them gives meanwhile to a row that was written since becomes the default one, 1.

        Raises:
            RuntimeError: the writer is read-only. RowError: no such lane. TypeError: no ints.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.empty()
        >>> len(rb), rb.write_count
        (0, 0)
        """
        self._wiring.check_editable("empty")
        self._discard_prefetched("empty")
        lanes = None if lane is None else self._lanes.meant(lane, "empty")
        self._rows.empty(lanes, keep_write_count=not empty_write_count)

    def end_trajectory(self, lane: Lane = None, *, terminated: bool = False, roles: Roles | None = None) -> Tensor:
        """Make the newest step of a lane the last one of its trajectory, as a truncation.

        For an episode that will not go on: its environment was reset or replaced, or the process that wrote it died. Without an end,
        windows and n-step returns would run on into the next episode. What the stored end flags say is edited in place, so every
        sampler and process sees the end, also after :meth:`open`; the row keeps its priority. Samplers that go by trajectory ids look
        at the id of the next step instead.

        Args:
            lane: an int; a list, tuple, range, array or tensor of ``k`` ints; or ``"each"``, all lanes. Default: the handle's
                (:meth:`on_lane`); else all. Another process must not write to the lane meanwhile.
            terminated: the step is terminal, so that values are not bootstrapped from its next observation.
            roles: what fields mean that are not called as usual, such as ``{("next", "over"): "done"}``. Usual are ``done``,
                ``terminated``, ``truncated`` and ``step_type`` at any depth, those below ``"next"`` first.

        Returns:
            int64 ``[k]``, CPU or the storage's device: of each lane the row that has become an end; -1 where nothing changed, as the
            lane is empty, or its newest step was an end already, of whichever kind. With ``ndim > 1`` ``[columns, ndim]``.

        Written are the ``done`` flag, and ``truncated`` (with ``terminated=True`` that one in its place), those of them that are
        stored; a ``step_type`` becomes 2, the last step. The edit leaves the row's generation as it is, so priorities that come late
        for it still arrive.

        Raises:
            RowError: no such lane. TypeError: no ints; a list storage, which has no fields.
            RuntimeError: no stored flag can say it (nothing does where ids alone tell trajectories apart: give the next step
                another id); a read-only writer, or one that keeps the best rows.
            KeyError, ValueError: ``roles`` that name no stored field, or no role. Nothing is changed.

        Cost: O(lanes · bytes of a row). Other processes scan for trajectories again at their next draw of windows.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(20, lanes=2))
        >>> _ = rb.extend({"obs": torch.arange(5), "done": torch.zeros(5, dtype=torch.bool)}, lane=0)
        >>> rb.end_trajectory().tolist()  # the second lane is empty
        [4, -1]
        >>> rb["done"].tolist()
        [False, False, False, False, True]
        """
        return self._rows.end_trajectories(self._lanes.meant(lane, "end_trajectory"), roles, terminated=terminated)

    def record(
        self,
        env: E,
        *,
        lane: Lane = None,
        names: Names | None = None,
        store: Examples | None = None,
        info_keys: Examples | None = None,
    ) -> E:
        """Wrap an environment, so that every step it takes becomes a row.

        Args:
            env: a Gymnasium ``Env`` or ``VectorEnv``, a PettingZoo ``ParallelEnv`` or a dm_env ``Environment``.
            lane: where its steps go: an int for one environment; of ``n`` environments (or agents) a list, range, array or tensor of
                ``n`` ints, or ``"each"``. Default: the handle's (:meth:`on_lane`), else ``"each"``.
            names: under which fields are stored that are to have other names, by the usual one:
                ``{"observation": "obs", ("next", "observation"): "next_obs"}``.
            store: what the agent computes and each row is to hold, such as a log-probability or a recurrent state: examples by name,
                of one environment. :meth:`note` supplies the values before every step.
            info_keys: entries of ``infos`` that each row is to hold, with an example. ``"action_mask"`` is the entry that came with the
                observation, ``("next", "action_mask")`` that which the step returned.

        Returns:
            An environment of the same kind. Its ``reset`` and ``step`` return exactly what those of ``env`` do; attributes are those of
            ``env``. Train with it as before: ``obs, reward, terminated, truncated, info = env.step(action)``.

        A row is ``observation, action`` and below ``"next"`` ``observation, reward, terminated, truncated, done``, where ``done`` is
        either of the two others. Dtypes are those of the spaces, nested like these; rewards are float32. In a
        :class:`TensorDictReplayBuffer` the last four are ``[n, 1]``, else ``[n]``.

        Rows are what a correct agent has seen: ``metadata["autoreset_mode"]`` of a vector says how. Under ``NEXT_STEP`` the step after
        an end only resets, and is no row. Under ``SAME_STEP`` the next observation of a last step is ``infos["final_obs"]``. Under
        ``DISABLED`` an episode begins with ``reset(options={"reset_mask": …})``. Environments may return arrays, tensors on any
        device (also those that require gradients), TensorDicts or lists, and flags ``[n]``, ``[n, 1]`` or one for all.

        What was open in these lanes ends at once as a truncation (:meth:`end_trajectory`), such as an episode that ``kill -9`` has
        cut. So does an episode that a ``reset`` cuts, or a step that raised or was interrupted.

        Of PettingZoo, each agent in ``possible_agents`` is recorded as an environment of its own, in this order. Of dm_env, an end with
        a discount of 0 is terminal, every other one a truncation; ``info_keys={("next", "discount"): 1.0}`` stores discounts.

        Raises:
            TypeError: another kind of environment; a space of texts, graphs or sequences; a list storage; an example of no numbers.
            ValueError: not a lane for each environment; an unknown autoreset mode; agents with different spaces; names that collide.
            KeyError: ``names`` of something that is not recorded. ``step``: ``RuntimeError`` before the environment is stepped if
                something of ``store`` was not noted, or another environment that is recorded to one of the lanes was reset since;
                ``KeyError`` if an info lacks an entry; ``ValueError`` for rewards or flags of
                another number of environments; and what :meth:`end_trajectory` and, at each step, :meth:`add` or
                :meth:`extend` raise.

        Cost: a step takes at most what an :meth:`appender` takes, if its values are arrays, CPU tensors or numbers of the dtypes of the
        spaces, and nothing else looks at writes: no transform, limit, or sampler that listens. Otherwise it takes one :meth:`add` or
        :meth:`extend`, and a copy of the observations.

        >>> import gymnasium
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000, lanes=2), batch_size=8)
        >>> env = rb.record(gymnasium.make_vec("CartPole-v1", num_envs=2))
        >>> observation, info = env.reset(seed=0)
        >>> for _ in range(20):
        ...     observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        >>> rb.sample()["next"]["observation"].shape
        torch.Size([8, 4])
        """
        notes, lanes, writing = Notes(store), self._lanes.meant(lane, "record"), self._writing
        own = any(overrides.overrides(type(self), call) for call in ("add", "extend"))
        appending: Appending = (lambda _: None) if own else (lambda rb: rb._writing.appending())  # noqa: SLF001 - self, or a copy
        how = (writing.takes_tensordicts, notes, Infos(info_keys), appending)
        target = Target(self, lanes, names, *how, self._priority_key)
        recorded = record(env, target)
        writing.notes = notes
        return recorded

    def note(self, values: Examples | None = None, /, **fields: object) -> None:
        """Supply what the next step of the recorded environment stores: the fields that ``record(env, store=…)`` declares.

        Args:
            values: fields by key, for nested ones: ``{("agent", "value"): …}``.
            fields: the same as keyword arguments. A value is an array, tensor (on any device, with or without gradient) or number,
                ``[*shape]`` of one environment and ``[n, *shape]`` of ``n``; or a dict of them. Copied.

        The next ``step`` stores them and forgets them, so that no row holds the values of another step. A step that is no row, such as
        one that only resets, forgets them, too. Several calls before a step add up.

        The values go to the environment that this handle recorded last. Record several at a time through a handle each.

        Raises:
            KeyError: a field that was not declared. TypeError: another kind of numbers. ValueError: another shape. Nothing is kept.

        >>> import gymnasium, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000, lanes=2), batch_size=8)
        >>> env = rb.record(gymnasium.make_vec("CartPole-v1", num_envs=2), store={"log_prob": 0.0})
        >>> policy = torch.nn.Linear(4, 2)
        >>> observation, info = env.reset(seed=0)
        >>> for _ in range(10):
        ...     chosen = torch.distributions.Categorical(logits=policy(torch.from_numpy(observation)))
        ...     action = chosen.sample()
        ...     rb.note(log_prob=chosen.log_prob(action))
        ...     observation, reward, terminated, truncated, info = env.step(action.numpy())
        >>> rb.sample()["log_prob"].shape
        torch.Size([8])
        """
        self._writing.notes.put(values or {}, fields)

    # ---- sampling ------------------------------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: Size = ..., return_info: Literal[False] = ..., **how: Unpack[SampleArguments]
    ) -> Batch: ...
    @overload
    def sample(
        self, batch_size: Size = ..., *, return_info: Literal[True], **how: Unpack[SampleArguments]
    ) -> Told[Batch]: ...
    @overload
    def sample(self, batch_size: Size, return_info: bool, **how: Unpack[SampleArguments]) -> Any: ...
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        device: Device = None,
        timeout: Wait = WAIT_S,
        layout: LayoutOfCall = None,
        max_tokens: Tokens = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: rows; default the constructor's, and nothing else with ``prefetch``.
            return_info: return ``(batch, info)``; ``info["index"]`` is int64 ``[B]`` (with ``ndim > 1`` a tuple of those).
            include_info: deprecated, and without effect: TensorDicts always have ``"index"``.
            device: where every tensor of the batch and of ``info`` is to be. A GPU reads rows in RAM or in shared memory by itself, as
                with ``DeviceReplay``, whose one-line form this is: nothing waits, and after a first call outside a CUDA graph may
                capture it. Where something of a batch needs the host (``docs/gpu.md`` says what), the host draws and sends it, from
                pinned memory without waiting for the copy.
            timeout: seconds to wait for a :meth:`limit` of the store; 0: try once; None: for ever. With ``prefetch``, until a thread
                has been admitted that makes the batch. Where it is given, also for the groups of a :class:`PromptGroupSampler`: without
                it there are enough of them, or none is waited for.
            layout: how this batch holds ragged fields; default the storage's: ``"packed"``, ``"jagged"``, ``"list"``, ``"padded"`` or
                ``{"kind": "padded", "side": "left", "multiple": 8}``, rows of one length, zeros on that side, a length that this divides.
            max_tokens: draw as many rows as fit: rows are drawn one after the other, and the batch ends before the first that it would
                have more tokens with, or at ``batch_size`` rows, if that is named here. The constructor's does not count. Tokens of a
                row are the items of its longest ragged field that is no text (of texts alone, the bytes); with ``{"tokens": 4_096}``
                those of that field. Of padded batches the padding counts, too.

                A row that did not fit is not used up: epochs go on with it, and a :class:`ConsumingSampler` or groups draw it
                another time, so that all rows come as often as without a budget. Groups are drawn whole. With replacement long rows
                come a little less often: in each batch one draw at most is dropped, and it is a long one more often than others.

        Returns:
            New tensors ``[B, ...]`` in the form of the rows (dict in, dict out; a dataclass without a call of its ``__init__``) or the
            constructor's ``output``, on the storage's device or the one named. Samplers without
            replacement may return fewer rows at the end of a pass.

        Raises:
            RuntimeError: no batch size is known; the buffer was shut down; with ``prefetch``, it was closed, or one of its own
                transforms is calling; of TensorDicts, a transform or collate function changed the batch size, so that keys cannot be
                attached.
            NoSampleable: the buffer is empty (a ``RuntimeError``).
            RateLimited: the limits of the store did not admit the batch in time. Nothing is drawn.
            ValueError, TypeError: ``layout`` or ``max_tokens`` of a buffer without ragged fields, or with ``prefetch``; ``max_tokens`` with
                windows, limits, ``drop_last`` or ``num_groups``, or fewer than the first row, or group, has: nothing is used up.
                KeyError: of a field that is not ragged.
            ValueError: ``batch_size`` below 1, or with ``prefetch`` another one than the constructor's; ``device`` with
                ``output="numpy"``; with ``"namedtuple"``, a name that cannot be an attribute.
            TypeError: ``output="numpy"`` of a dtype that NumPy does not have, bfloat16 or float8. RuntimeError: no such device; or a
                graph is being captured on it, and the batch needs the host, with the cause.

        Cost: O(bytes of the batch): two native calls at most. Releases the GIL; may be called from several threads.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.sample()["obs"].shape
        torch.Size([4, 3])
        >>> batch, info = rb.sample(return_info=True)
        >>> info["index"].shape
        torch.Size([4])
        """
        settings, reading = self._settings, self._reading
        if include_info is not None:
            words.warn("sample: include_info is deprecated: samples always carry their index.")
        if layout is not None or max_tokens is not None:
            form = BatchForm.checked(layout, max_tokens)
            reading = form.of(reading, self._wiring, ahead=self._prefetching is not None)
        if batch_size is None and max_tokens is None:
            batch_size = settings.batch_size
        if batch_size is None and max_tokens is not None:
            batch_size = 0  # of any number
        elif not isinstance(batch_size, int) or batch_size is True or batch_size != settings.batch_size:  # 4.0 equals 4
            batch_size = settings.batch_size_of(batch_size)
        return_info = return_info is not False and bool(return_info)
        if not self._wiring.gate.samples:
            self._wiring.gate.check_open("sample")
        timeout = timeout if timeout is WAIT_S else checked_timeout(timeout, "sample")
        target = None if device is None else target_of(device, settings.output)
        if target is not None and target.type == "cuda" and reading is self._reading:
            read = self._rows.replays.sample(target, batch_size, return_info)
            if read is not None:
                return read
        reading = reading if timeout is WAIT_S else self._wiring.awaiting(reading)
        sample = reading.sample(batch_size, return_info, timeout)
        return sample if target is None else moved(sample, target)

    def device_readable(self) -> on_device.OnDevice:
        """What ``DeviceLoader`` and ``DeviceReplay`` need of the buffer: for them alone.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), transform=lambda batch: batch)
        >>> rb.device_readable().refusal  # why a GPU cannot read batches by itself
        'a transform'
        """
        return on_device.OnDevice(self._wiring, self._settings, self._read_path(self._wiring))

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether drawing a batch would find data now, and the limits of the store would admit it. Of ragged rows without a batch size:
        whether ``sample(max_tokens=)`` would find a row, or a group.

        Raises ``RuntimeError`` if no batch size is known, and rows are not ragged.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.can_sample()
        False
        >>> _ = rb.add({"obs": [0.0]})
        >>> rb.can_sample()
        True
        """
        if batch_size is None and self._settings.batch_size is None and self.storage.is_ragged:
            batch_size = self._wiring.source.rows_of_unit
        return self._wiring.can_sample(self._settings.batch_size_of(batch_size, drawing=False))

    def limit(self, *limits: Limit | None) -> Self:
        """Let inserts wait for samples, or samples for inserts: see docs/flow-control.md.

        Limits belong to the store: they hold for every process and buffer that uses it, now and after :meth:`open`, until they are
        replaced. Rows are counted, not calls; those that prefetch draws when it draws them. Buffers with ``readonly=True`` neither
        wait nor count.

        Args:
            limits: :class:`SamplesPerInsert`, :class:`MinSize` and :class:`MaxInFlight`, one of a kind; or None: no limit.

        Returns:
            The buffer.

        What waits looks again. New limits begin balanced, in the middle of the band; :meth:`empty` and loads begin again. Limits
        that are in force already go on with their counts. A process that is killed amid an insert or a sample leaves its rows counted.

        Raises:
            TypeError: no limits; a ``ListStorage``. ValueError: two of a kind, or such that inserts and samples would wait for ever.
            ReadOnlyStore: the buffer only reads. WriterStalled: another process has been placing rows for 5 s. Nothing is changed.

        Cost: O(lanes). A limited call takes a few microseconds more; without limits a call reads one word.

        >>> import torch
        >>> from engram import LazyTensorStorage, RateLimited, ReplayBuffer, SamplesPerInsert
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=10)
        >>> _ = rb.limit(SamplesPerInsert(2, min_size=10, tolerance=0.5))
        >>> _ = rb.extend(torch.arange(15))
        >>> rb.sample().shape, rb.sample().shape
        (torch.Size([10]), torch.Size([10]))
        >>> try:
        ...     rb.sample(timeout=0)
        ... except RateLimited as error:
        ...     print(str(error).partition(": ")[2].partition(":")[0])
        10 rows were not admitted in time by SamplesPerInsert(ratio=2.0, min_size=10, tolerance=0.5)
        """
        self._wiring.limit(limits)
        return self

    limits: tuple[Limit, ...] = shows(lambda self: self._wiring.limits, "The limits of the store: see :meth:`limit`.")

    # ---- rows by number ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return 0 if self._settings.unmade is not None else self._wiring.source.drawable(self._wiring.storage)

    def __getitem__(self, index: Any) -> Any:
        """Rows by number, after collating and read transforms.

        Args:
            index: an int (one row, negative counts live rows from the end); a slice or bool mask over the live rows in row
                order; a list, range, array or tensor of rows; or a key, ``rb["a"]`` or ``rb["next", "reward"]``: that field
                of all live rows.

        Returns:
            A copy; but a contiguous slice of a tensor storage without transforms is a **live view**: a writer at work shows
            through, and writing to it writes the buffer unnoticed.

        Raises:
            RowError: a row that is not live (an ``IndexError``).
            KeyError: no such field.
            RuntimeError: nothing was ever written.
        """
        return self._rows.get(index)

    def __setitem__(self, index: object, value: object) -> None:
        """Replace live rows, or with a key one field of all live rows. Write transforms apply to rows.

        Cursor and length stay. One number goes into all fields of the rows.

        Raises:
            RowError: a row that is not live. KeyError: no such field: only ``rb[:] = data`` adds new ones, as :meth:`add_field` does.
                RuntimeError: shapes or dtypes differ. Nothing is written.
        """
        self._rows.set(index, value)

    def set_at_(self, key: object, value: object, index: object) -> Self:
        """Replace one stored field of live rows, in place, without transforms.

        Whatever they hold by now: :meth:`update_if_present` leaves rows alone that were written since they were drawn.

        Raises: as ``rb[index] = value``. TypeError: a list storage, which has no fields.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb = rb.set_at_("obs", torch.ones(2, 3), torch.tensor([0, 1]))
        >>> rb[1]["obs"].tolist()
        [1.0, 1.0, 1.0]
        """
        self._rows.set_field(key, value, index, "set_at_")
        return self

    def set_(self, key: object, value: object) -> Self:
        """Replace one stored field of all live rows: ``value`` is ``[len(rb), ...]``. Raises: as :meth:`set_at_`.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb = rb.set_("obs", torch.ones(10, 3))
        >>> rb[9]["obs"].tolist()
        [1.0, 1.0, 1.0]
        """
        self._rows.set_field(key, value, slice(None), "set_")
        return self

    def update_(
        self,
        input: object,  # noqa: A002 - TensorDict's name
        clone: bool = False,  # noqa: ARG002 - TensorDict's argument: what is stored is always a copy
        *,
        keys_to_update: Iterable[object] | None = None,
    ) -> Self:
        """Replace several stored fields of all live rows.

        Args:
            input: a (nested) dict or TensorDict of ``[len(rb), ...]`` tensors.
            clone: accepted for compatibility: values are always copied into the store.
            keys_to_update: only these keys; all of ``input`` by default.

        Raises: as :meth:`set_at_`. Keys and shapes are checked first; then nothing or everything is written.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb = rb.update_({"obs": torch.ones(10, 3)})
        >>> rb[9]["obs"].tolist()
        [1.0, 1.0, 1.0]
        """
        self._rows.update(input, keys_to_update)
        return self

    def update_if_present(
        self,
        *,
        index: object,
        generation: object,
        patch: object,
        version_key: object = None,
        version: object = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Replace fields of the rows that still hold what was drawn, and of no others.

        For what is computed from a batch and belongs to its rows, such as recurrent states: a row that another thread or process
        has overwritten since, or is writing, is left alone. An edit of a row by others does not count as that. Looking and
        writing are one step.

        Args:
            index: rows, as a batch says them in ``"index"``; -1 names none.
            generation: ``"index_generation"`` of the batch, a number per row. Batches carry it if the writer was made with
                ``track_generations=True`` (TensorDicts as an entry, others in ``info``), and those of prioritized samplers always.
            patch: a nested dict or TensorDict of stored fields, each ``[*generation.shape, ...]``; keys may be tuples. No transforms.
            version_key: a stored field of one number per row: only rows whose number is at most ``version`` are written, which
                becomes their number. Of entries for one row the highest version is written, of equal ones the last. Any version
                replaces NaN, and NaN none.
            version: a number for all, or one per row, of the field's dtype.
            require_newer: rows whose number equals ``version`` are not written, either.

        Returns:
            Masks of what was written and what was not, with counts; and the ``generation`` of each row that was written, which an
            edit leaves as it is: the same handles work again until the row is overwritten. Of a row named twice, without versions,
            all entries are written in order.

        Windows that were padded name their first or last step again, and the last entry of a row stays: pass -1 as ``generation``
        where ``"validity_mask"``, or ``("collector", "mask")`` of ``pad_output``, is false.

        Raises:
            KeyError: no such field. ValueError: another shape or dtype, another number of generations than of rows; one of
                ``version_key`` and ``version`` alone, or a version key of more than one number or in the patch. TypeError: no patch,
                no ints. RowError: a row outside the storage. Nothing is written.
            RuntimeError: nothing was ever written, a list storage, a read-only writer, or one that does not track generations.
            WriterStalled: another writer has been editing a row for 5 s. The entries before it are written.

        Cost: O(bytes of the patch), one native call; with versions a second one, which reads them. Releases the GIL. ``stats()``
        counts ``field_updates``, rows written, and ``field_updates_dropped``, the others, over all processes.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
        >>> _ = rb.extend({"obs": torch.arange(4), "state": torch.zeros(4)})
        >>> batch, info = rb.sample(100, return_info=True)
        >>> _ = rb.add({"obs": torch.tensor(9), "state": torch.tensor(0.0)})  # overwrites row 0
        >>> result = rb.update_if_present(
        ...     index=info["index"], generation=info["index_generation"], patch={"state": batch["obs"] + 10.0}
        ... )
        >>> result.stale_count == int((info["index"] == 0).sum())
        True
        >>> rb["state"]
        tensor([ 0., 11., 12., 13.])
        """
        return self._rows.update_if_present(index, generation, patch, version_key, version, newer=require_newer)

    submit_update_if_present = submit_update_if_present
    remove, index_keys, rows_of = row_access.remove, row_access.index_keys, row_access.rows_of

    def read_all_in_order(self, end: int | None = None, *, lane: Lane = None) -> Any:
        """``rb[:end]``: live rows in row order, in the form in which they were written.

        Args:
            end: how many; None: all.
            lane: read these lanes instead, one after the other, each from its oldest to its newest row: an int, several ints, or
                ``"each"``. Rows as by ``rb[rows]``, a copy.

        Raises:
            RowError: no such lane. TypeError: no ints.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.read_all_in_order(end=3)
        tensor([0, 1, 2])
        >>> _ = rb.extend(torch.arange(5, 12))  # the ring begins again
        >>> rb[:].tolist()
        [10, 11, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> rb.read_all_in_order(lane=0).tolist()
        [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
        """
        return self._rows.in_order(lane if lane is None else self._lanes.meant(lane, "read_all_in_order"), end)

    def write_all(self, data: object, end: int | None = None) -> None:
        """``rb[:end] = data``; ``end`` defaults to the number of rows given. Of all rows, new entries become fields, as by
        :meth:`add_field`; of some of them they raise ``KeyError``.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
        >>> _ = rb.extend(torch.arange(5))
        >>> rb.write_all(torch.tensor([7, 8]))
        >>> rb[:].tolist()
        [7, 8, 2, 3, 4]
        """
        end = rows_of(data) if end is None else end
        self._rows.set(slice(None if end == len(self) else end), data, "write_all")

    # ---- components ----------------------------------------------------------------------------------------------------

    storage: Storage = shows(lambda self: self._wiring.storage, "What holds the rows: a :class:`Storage`.")

    @property
    def sampler(self) -> Any:
        """What chooses rows to read."""
        if not self._wiring.draws_natively:
            self._materialize()  # it may be changed now
        return self._wiring.sampler

    @property
    def writer(self) -> Any:
        """What chooses where new rows go."""
        self._materialize()  # it may write now
        return self._wiring.writer

    dim_extend: int = shows(
        lambda self: self._wiring.storage.dim_extend, "Dimension of ``extend``'s data along which time runs."
    )

    def share(self, shared: bool = True) -> Self:
        """Let processes that receive the buffer from now on see the same rows: all of them may write, sample and update.

        A ``LazyMemmapStorage`` is shared already. The rows of a ``LazyTensorStorage`` move to a folder in the system's
        shared memory, whose RAM is taken at once; the last process that closes it removes it. No other thread may use the
        buffer meanwhile; views handed out before show the old memory. A buffer that is handed to a process which is being
        started by ``spawn`` or ``forkserver`` is shared at that moment. Before a ``fork``, call this.

        Args:
            shared: False does nothing.

        Returns:
            The buffer.

        Raises:
            RuntimeError: a storage that cannot be shared: a list, on an accelerator, or around shared memory that cannot be a
                store (see docs/guarantees.md).
            OSError: it does not fit into shared memory. Nothing has changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100)).share()
        >>> rb.extend(torch.arange(3)).tolist(), rb.shared
        ([0, 1, 2], True)
        """
        if shared and not self.shared:
            self._following.refuse("share")
            self._materialize()
            self._wiring.storage.share()
        return self

    def moved(self) -> None:
        """Called by the storage when its rows lie in another store, or in none until the next write.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> storage = LazyTensorStorage(10)
        >>> rb, other = (ReplayBuffer(storage=storage, batch_size=4) for _ in range(2))
        >>> _ = rb.extend(torch.zeros(3))
        >>> _ = other.share()  # the storage calls rb.moved, too
        >>> rb.shared, rb.sample().shape
        (True, torch.Size([4]))
        """
        self._wiring.moved()
        self._rewire()
        self._recipe.noted = False
        self._recipe.note_if_possible()

    def set_storage(self, storage: GivenStorage, collate_fn: Callable[[Any], object] | None = None) -> Storage:
        """Swap the storage (and the collate function, if one is given); the previous storage is returned.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> before = rb.set_storage(LazyTensorStorage(50))
        >>> len(before), len(rb)
        (10, 0)
        """
        wiring = self._wiring
        previous: Storage = wiring.storage
        made = component(storage, storages.Storage, "storage", None)
        wiring.check_storage(made)
        self._discard_prefetched("set_storage")
        named = self._lanes.named
        wiring.storage = made
        self._lanes.take(named)
        previous.detach(self)
        made.attach(self)
        if collate_fn is not None:
            wiring.collate_fn = collate_fn
        wiring.take_sampler(wiring.sampler, self._settings.batch_size)
        wiring.take_writer(wiring.writer)
        self._recipe.noted = False
        self._rewire()
        return previous

    def set_sampler(self, sampler: Sampler) -> Any:
        """Swap the sampler; the previous one is returned.

        Raises ``ValueError``: with it, a limit of the store (:meth:`limit`) would make inserts wait for ever. Nothing is changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> from engram import SamplerWithoutReplacement
        >>> before = rb.set_sampler(SamplerWithoutReplacement())
        >>> [len(batch["obs"]) for batch in rb]
        [4, 4, 2]
        """
        previous = self._wiring.sampler
        made = self._wiring.checked_sampler(sampler)
        self._discard_prefetched("set_sampler")
        self._wiring.take_sampler(made, self._settings.batch_size)
        self._rewire()
        self._recipe.note()
        return previous

    def set_writer(self, writer: Writer) -> Any:
        """Swap the writer; the previous one is returned. Cursors belong to the store: the next write goes on there.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> from engram import ImmutableDatasetWriter
        >>> before = rb.set_writer(ImmutableDatasetWriter())
        >>> rb.add({"obs": torch.zeros(3)})
        Traceback (most recent call last):
        ...
        RuntimeError: ...
        """
        previous = self._wiring.writer
        made = component(writer, Writer, "writer", None)
        self._discard_prefetched("set_writer")
        self._wiring.take_writer(made)
        self._rewire()
        self._recipe.note()
        return previous

    def update_priority(self, index: object, priority: Any = None, *, generation: Tensor | None = None) -> None:
        """New priorities of rows; a sampler without priorities warns and does nothing.

        Args:
            index: rows as ``info["index"]`` or :meth:`extend` names them; -1 is passed over, of duplicates the last counts. Or
                the whole ``info`` of a batch, which has the generations, too; of a :class:`Sequence` the anchors get the priorities.
            priority: needed: a number for all, also as ``[1]``, or ``[B]``: at least 0 and finite. Of windows also one for each, which
                the step gets that the window was drawn by: its first one, or the first behind the burn-in.
            generation: ``info["index_generation"]``: rows rewritten since they were drawn are dropped and counted in ``stats()``.

        Priorities on a GPU, of a batch of ``sample(device=)`` that the GPU read, are sent without waiting, as by
        ``DeviceReplay.update_priority``: they show in draws some batches later.

        Raises:
            PriorityError: a priority is NaN, infinite, negative or too large. Nothing is changed.
            RowError: a row outside the storage. RuntimeError: another number of priorities than of rows, or of windows. Nothing is
                changed.
            TypeError: no rows, such as a TensorDict, or no priorities. Nothing is changed.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> batch, info = rb.sample(return_info=True)
        >>> rb.update_priority(info["index"], torch.rand(4), generation=info["index_generation"])
        """
        refuse_batch(index, priority)
        replays = self._rows.replays
        if replays.made and replays.update(index, priority, generation):
            return
        rows, priority, generation = window_marks.of_batch(self._wiring, index, priority, generation)
        self._bound_sampler().update_priority(rows, priority, generation=generation)
        self._recipe.note_priorities()

    def mark_update(self, index: object) -> None:
        """Rows were rewritten: give them the default priority again. No effect on samplers without priorities.

        >>> import torch
        >>> from engram import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
        >>> sampler = PrioritizedSampler(alpha=0.6, beta=0.4)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.update_priority(rows, torch.full((10,), 0.5))
        >>> rb.mark_update(rows[:2])
        """
        self._bound_sampler().mark_update(self._wiring.rows_named(index))

    def _bound_sampler(self) -> DeclaredSampler:
        """The sampler, which may have served another storage meanwhile."""
        self._materialize()
        return self._wiring.bound_sampler()

    def _rewire(self) -> None:
        """After a change of components: choose paths."""
        self._wiring.choose_paths()
        if self._wiring.untraced:
            conf.leave_untraced(self)
        super()._rewire()

    def _discard_prefetched(self, call: str, *, keys: bool = True) -> None:
        self._following.refuse(call)
        super()._discard_prefetched(call, keys=keys)

    # ---- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors and plain values: copies, which ``torch.save`` and the like carry.

        Keys: ``_storage`` (rows, their order, cursors, indexes), ``_sampler`` (with the index that it draws from),
        ``_writer``, ``_transforms``, ``_batch_size``, ``_lane`` (a list of the one that was named, or 0), ``_iterating``
        (whether :meth:`next` is amid a pass), ``_consume_after_n_samples``, ``_rng`` (``[state, device]`` of the generator that was
        given, else None), ``_default_rng`` (the state of torch's) and ``_prefetch_state``. Writers, of all processes, wait meanwhile.

        Raises:
            TypeError: something that is neither a tensor nor a plain value, in items of a list or in the state of a component of
                your own; names the way to it.

        Cost: O(bytes of the rows), which are copied.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> state = rb.state_dict()
        >>> twin = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> twin.load_state_dict(state)
        >>> len(twin)
        10
        """
        return self._saving.state_dict()

    def load_state_dict(self, state_dict: dict[str, object], *, default_rng: bool = False) -> None:
        """Take over a saved state: every later operation gives what it would have given then.

        Draws, too, if a generator was given, or with ``default_rng``. Rows keep the numbers of their writes, by which handles name
        them; those of TorchRL get new ones. What this buffer drew before may name other rows then: no priority of it should follow.
        Samplers of other buffers on the storage hear of an emptied one.

        Args:
            state_dict: of a buffer with the same kinds of components, and fields, capacity and lanes as here, if anything was
                written; or of a buffer of TorchRL 0.14 with a tensor storage: rows, cursor, priorities and generator are taken.
            default_rng: set torch's default generator, too: for the whole program.

        Raises:
            KeyError: a missing or unknown entry. TypeError: one of another type. ValueError: one out of range.
            IncompatibleCheckpoint: another schema, capacity, number of lanes, alpha or eps (a ``ValueError``). Whatever components of
                your own raise. Nothing is changed.
            OSError: no space for the rows. The buffer is empty then, if it was not already.

        Cost: O(bytes of the rows), which are copied.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> twin = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> twin.load_state_dict(rb.state_dict())
        >>> twin[0]["obs"].tolist()
        [0.0, 0.0, 0.0]
        """
        self._following.refuse("load_state_dict")
        self._saving.prepare_state(state_dict, default_rng=default_rng).commit()

    def dumps(self, path: StrPath, *, prefetch: str = "save", progress: OnProgress | None = None) -> None:
        """Save the buffer as a folder, which in one step replaces one that was saved there; on NFS and the like in two.

        All of :meth:`state_dict`, a folder per component; ``TensorDict.load_memmap(path / "storage")`` reads the rows of a tensor
        storage. Of rows that were never written nothing is saved. What is saved is as it was at one moment, for which writers, of all
        processes, wait: for the copy of 8 bytes per row and priority, and of all rows if these are below 32 MiB or items of a
        ``ListStorage``. Larger ones are copied while others write: a row that is overwritten or changed before that is left out, and
        the log says how many. Readers do not wait. What was replaced is removed in the background, where the end of the
        program waits for it.

        Args:
            path: a free name, an empty folder, or what an earlier call has made.
            prefetch: ``"drop"`` leaves out batches that were drawn ahead: then the saved buffer draws others in their place.
            progress: called with a :class:`Progress` now and then. Default: a bar on a terminal if it takes longer than a second.

        Raises:
            FileExistsError: something else lies there.
            TypeError: something that is neither a tensor nor a plain value; names the way to it.
            ValueError: ``prefetch`` is neither ``"save"`` nor ``"drop"``.
            OSError: no space, or an I/O error. What lay there before still does.

        >>> import tempfile, torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb, other = (ReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2))
        >>> _ = rb.extend(torch.arange(10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb.dumps(f"{folder}/replay")
        ...     other.loads(f"{folder}/replay")
        >>> other[:3]
        tensor([0, 1, 2])
        """
        self._saving.dumps(path, prefetch, progress)

    def loads(
        self, path: StrPath, *, convert: bool = False, default_rng: bool = False, progress: OnProgress | None = None
    ) -> None:
        """Take over what :meth:`dumps` saved: every later operation gives what it would have given then.

        Args:
            path: the folder; or one that TorchRL 0.14 dumped: its rows, cursor, priorities with alpha and beta, and generator are
                taken. Its pickles are never opened; a warning names them.
            convert: of another capacity or number of lanes whole trajectories are taken, the newest first, and divided among the lanes:
                fields that mean lanes, ids or positions (``env_id``, ``collector/traj_ids`` or ``episode``) are rewritten. With a
                ``TensorDictMaxValueWriter`` the best rows are taken, as they are. A new epoch begins, prefetched batches are dropped.
                Priorities of another ``alpha`` or ``eps`` are computed again. What is left out is counted in a warning. And another
                sampler may have saved it, with its buffer class: rows without priorities get the default one, tables of trajectories
                are built, priorities are taken by every sampler that has some; the log says so. A batch size given here stays.
            default_rng: as for :meth:`load_state_dict`.
            progress: as for :meth:`dumps`.

        Raises:
            CorruptCheckpoint: damaged; names file and byte. IncompatibleCheckpoint: a folder of checkpoints, or saved by other kinds of
                components, or as :meth:`load_state_dict`. Nothing is changed; but where nothing was stored rows are checked while
                they are read, and nothing is stored if that fails.
            OSError: no space for the rows, or an I/O error. The buffer is empty then, if it was not already.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.dumps("loads-example")
        >>> twin = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> twin.loads("loads-example")
        >>> len(twin)
        10
        """
        self._following.refuse("loads")
        self._saving.loads(path, convert=convert, default_rng=default_rng, progress=progress)

    dump, save, load = dumps, dumps, loads
    # ---- what a Checkpointer asks for ----------------------------------------------------------------------------------

    form = shows(lambda self: self._saving.form, "How the buffer keeps its rows, as far as a checkpoint must know.")
    snapshot = shows(
        lambda self: self._saving.snapshot, "All that a checkpoint saves, as it is now: as ``Checkpointable`` has it."
    )
    prepare_load = shows(lambda self: self._saving.prepare_load, "Check a rank's shard: as ``Checkpointable`` has it.")
    prepare_placed = shows(
        lambda self: self._saving.prepare_placed, "Check what a plan gives to a rank: as ``Checkpointable`` has it."
    )

    @property
    def savers(self) -> ShardSavers | None:
        """What saves it where its rows are, on Ray; None: this process does."""
        return self._service.savers(self)

    # ---- life ----------------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: StrPath,
        *,
        unclean: str = "refuse",
        readonly: bool = False,
        io: str = "auto",
        **arguments: Unpack[conf.OpenArguments],
    ) -> ReplayBuffer[Batch]:
        """Go on with a store in a directory: same rows, length, cursors and lanes, sampling at once.

        Buffer class, sampler, writer, batch size, prefetch, output and dtypes are those of the buffer that last began to write rows
        or priorities to it, but one that was given no sampler takes no other one's place; an argument replaces one. If its process
        died, rows that were half written are set aside and that is logged. Within one process, a store that is open already is
        attached to. Of rows of a dataclass or named tuple that this program has not defined it makes named tuples with its fields,
        and warns once.

        Args:
            directory: the ``scratch_dir`` of a ``LazyMemmapStorage``.
            sampler, writer, collate_fn, transform, batch_size, prefetch, pin_memory, generator, output: as for the constructor. Default:
                what the directory notes.
            unclean: ``"accept"`` takes a store that was open when the machine went down; ``"refuse"`` raises.
            readonly: only read, beside processes that write or without them: for evaluation, plots, or several trainings from one
                data set. Needs no right to write; nothing in the directory changes.
            io: as for ``LazyMemmapStorage``.

        With ``readonly`` rows that others write appear, whole, at the next draw. Rows that a dead process left half written are
        passed over. Every write, and :meth:`state_dict`, :meth:`dumps` and a ``Checkpointer``'s save, which would make writers wait,
        raise ``ReadOnlyStore``. Priorities are a copy of those there were when the sampler came to the store: :meth:`update_priority`,
        alpha and beta change this copy alone, and rows written since have the priority of the row that was there before, or none. An
        epoch without replacement is the buffer's own. A live view (``rb[:]``) keeps what is written to it to itself. A copy that is
        pickled to another process is opened there, read-only, too.

        Raises:
            FileNotFoundError: no store there.
            StoreInUse: as many processes as can share it do, or one has been creating or closing it for a minute. Never if ``readonly``.
            CorruptStore: a file is missing, truncated or changed. Nothing is modified.
            IncompatibleStore: made by a newer engram or on another platform.
            UncleanStore: see ``unclean``.
            TypeError: it was used with a custom sampler or writer, or with a tensorclass the program has not defined; it would not draw
                by priority, and ``open`` is that of a prioritized class.

        Cost: O(1), and O(capacity) words if the last process died, or for a copy of priorities.

        >>> import tempfile, torch
        >>> from engram import LazyMemmapStorage, ReplayBuffer
        >>> folder = tempfile.mkdtemp()
        >>> rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder + "/replay"))
        >>> _ = rb.extend(torch.arange(3))
        >>> reader = ReplayBuffer.open(folder + "/replay", readonly=True)
        >>> _ = rb.add(torch.tensor(3))
        >>> reader[:].tolist()
        [0, 1, 2, 3]
        """
        given = {name: value for name, value in arguments.items() if name in conf.OPEN_ARGUMENTS}
        left = {name: value for name, value in arguments.items() if name not in given}
        unsupported.reject_unsupported(
            "open", left, conf.NOT_YET, [*conf.OPEN_ARGUMENTS, "directory", "unclean", "readonly", "io"]
        )
        asked = cls.__name__ if cls._prioritized else None
        return cast("ReplayBuffer", open_buffer(directory, unclean, io, given, readonly=readonly, prioritized=asked))

    @classmethod
    def open_or_create(
        cls,
        directory: StrPath,
        size: int,
        *,
        lanes: int = 1,
        ndim: int = 1,
        dtypes: Mapping[str | tuple[str, ...], torch.dtype] | None = None,
        unclean: str = "refuse",
        io: str = "auto",
        group_small_fields: int = 0,
        **arguments: object,
    ) -> Self:
        """The first line of a script that may be killed and started again: the buffer in a directory, made if there is none.

        The result is ``cls(storage=…, **arguments)`` over the store in the directory, with its rows, cursors and priorities. Where
        there is none, the first write creates it. Several processes may call this at the same time: one creates the store, the
        others write to the same one. Unlike :meth:`open`, sampler, batch size and the like are the arguments', not those noted.

        Args:
            directory: a store, an empty folder or a free name.
            size: capacity in rows, the same at every start. ``lanes`` and ``ndim``: as for ``LazyMemmapStorage``, the same, too.
            dtypes: as for ``LazyMemmapStorage``. Without them, nothing is cast, whatever an earlier start said.
            unclean, io: as for :meth:`open`.
            group_small_fields: of a store that is made, as for ``LazyMemmapStorage``; one that is there stays as it is.
            **arguments: those of the class's constructor, but ``storage``; and ``ragged``, ``ragged_bytes``, ``ragged_layout``,
                ``layout`` and ``open_rows``, as for ``LazyMemmapStorage``. The first three must be the same at every start.

        Raises:
            FileExistsError: the folder holds other files, and no store. Nothing is changed.
            IncompatibleStore: its store has another capacity, other lanes, another ndim, other dtypes or ragged fields; or rows that
                are no TensorDicts, for a class of these. Nothing is changed.
            OSError: the folder cannot be made or written to.
            StoreInUse, CorruptStore, UncleanStore, TypeError, ValueError: as :meth:`open` and the constructor.
            IncompatibleStore, RuntimeError (first write): another process has created a store of other fields or size meanwhile.

        Cost: as :meth:`open`.

        >>> import tempfile, torch
        >>> from engram import ReplayBuffer
        >>> folder = tempfile.mkdtemp()
        >>> for _ in range(2):  # the second time, the rows of the first are there
        ...     rb = ReplayBuffer.open_or_create(folder, 100, batch_size=4)
        ...     _ = rb.extend(torch.arange(3))
        ...     print(len(rb))
        ...     rb.close()
        3
        6
        """
        tensordicts = cls._write_path.takes_tensordicts
        store = size, lanes, ndim, dtypes, group_small_fields
        return open_or_create(cls, directory, store, unclean, io, arguments, tensordicts=tensordicts)

    follow = classmethod(following.follow_buffer)

    refresh = shows(lambda self: self._following.refresh, "Of a buffer of :meth:`follow`: take a newer checkpoint now.")
    followed = shows(lambda self: self._following.followed, "The checkpoint that :meth:`follow` holds, or None.")

    @classmethod
    def connect(cls, address: str | Sequence[str], **arguments: Unpack[conf.ConnectArguments]) -> ReplayBuffer[Batch]:
        """Use a store that ``engram serve`` or :func:`engram.serve` serves, by Arrow Flight: write, sample, update priorities.

        Buffer class, sampler, batch size, prefetch and output are those of the store, as for :meth:`open`; transforms and
        ``collate_fn`` run here. What needs the rows here, such as ``rb[:]``, ``set_sampler`` or ``state_dict``, raises
        ``RuntimeError`` and says what to do instead: see docs/serving.md.

        Args:
            address: ``"unix:/PATH"``, ``"HOST:PORT"`` or ``"grpc+tls://HOST:PORT"``, or several, in a list or with commas. Servers of
                one store, which they say themselves, stand in for each other. Several stores are one buffer: see docs/cluster.md.
                ``"file:PATH"`` or ``"dns:HOST:PORT"``: where the addresses of a fleet are listed, whose stores join and leave while it
                is used.
            token: the path of the file with the server's token, of mode 0600. A pickle takes the path along, and no secret.
            tls_root: the path of the certificate that signs the server's, PEM; a list, if servers have several. Default: the system's.
            tls_cert, tls_key: paths of a certificate of this client and its key, PEM, for servers that ask for one.
            patience: seconds for which servers that are gone are looked for, again and again. Default: 60.
            full: None, the default: a write returns when its rows are in the store. Else it returns at once, with -1 for each row,
                while at most 65,536 rows and 4 MiB are under way. Without these credits it waits (``"block"``), raises ``RateLimited``
                (``"raise"``), or drops its rows (``"drop"``), which ``stats()["rows_dropped"]`` counts. ``len(rb)`` and ``stats()``
                wait for what is under way; what a write raised, the next one does. Of one store only.
            missing: of several stores, one whose servers are gone is left out, with a warning, until it is back (``"skip"``, the
                default); a write to it waits for 10 seconds. Or ``patience`` ends, and ``ConnectionError`` is raised (``"wait"``).
            stratum: of several stores, the number of the one that draws all batches, for a learner of its own; they have
                ``"loss_factor"``, ``[B]``, to multiply the loss by. Default: batches have rows of all.
            compression: ``"zstd"`` compresses rows and batches on their way, which pays on a slow network: docs/serving.md says
                below which bandwidth. Default: None.
            own_lanes: with ``full``: no other client or process writes to the lanes of this buffer. Then ``add`` and ``extend`` return
                the rows' numbers at once; only the first write to a lane waits. A row that lies elsewhere, because another writer came
                between, is in the store, and the next write raises ``RowError``. Default: False.
            **arguments: ``collate_fn, transform, transform_factory, batch_size, prefetch, pin_memory, generator, output``, as for the
                constructor. With ``prefetch`` so many requests are under way, each of up to 8 small batches.

        Draws follow from the generator here, as they would of the store opened here. A sample whose server is gone is asked for again.
        A write that was not acknowledged is sent again, and done once; docs/serving.md names those that raise instead. Priorities are
        sent without waiting, and lost with their server.

        Raises:
            ConnectionError: no server answers, has a stream left, or has a certificate that is trusted; one that does not know the
                compression. PermissionError: no token or
                another one, or a token file that others may read.
            IncompatibleStore: the server speaks another protocol. ValueError: no address; several stores of different kinds, or whose
                sampler, writer or limits are those of one store; no such ``stratum``; a ``tls_cert`` without its ``tls_key``;
                ``own_lanes`` without ``full``.
            TypeError: an argument that a connection does not take. ModuleNotFoundError: ``engram-replay[serve]`` is not installed.

        Cost: a request takes about 0.1 ms by a Unix socket, and a copy of the batch on each side.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer, serve
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4).share()
        >>> _ = rb.extend({"obs": torch.zeros(10, 3)})
        >>> with serve(rb) as address, ReplayBuffer.connect(address) as there:
        ...     _ = there.extend({"obs": torch.ones(5, 3)})
        ...     print(len(there), there.sample()["obs"].shape)
        15 torch.Size([4, 3])
        """
        return cast("ReplayBuffer[Batch]", connecting.connect_buffer(cls, address, arguments))

    @classmethod
    def open_arguments(cls, record: dict[str, object]) -> dict[str, Any]:  # noqa: ARG003 - subclasses read it
        """Constructor arguments of this class in what a store recorded: :meth:`open` makes the buffer with them.

        >>> from engram import ReplayBuffer, TensorDictReplayBuffer
        >>> record = {"priority_key": "td_error"}
        >>> ReplayBuffer.open_arguments(record), TensorDictReplayBuffer.open_arguments(record)
        ({}, {'priority_key': 'td_error'})
        """
        return {}

    def close(self) -> None:
        """Release files and locks; a temporary folder is removed. Repeatable; tensors handed out stay valid.

        From then on every use of the buffer, of its storage and of a sampler that draws from it raises ``RuntimeError``. ``repr``,
        :attr:`closed`, the names of its components, public attributes of your own and ``cleanup()`` of a ``LazyMemmapStorage`` go on.
        Where several buffers of this process use one store, it is the last one that closes it, and the others go on. With
        ``prefetch`` the batches ahead are dropped, and the threads end, which is waited for but for seconds at most. A save in the
        background that was begun is finished. Files and locks are let go when the buffer is collected or the program ends, too.

        >>> from engram import ReplayBuffer
        >>> with ReplayBuffer.open_or_create("close-example", 100, batch_size=4) as rb:  # closes it at the end
        ...     _ = rb.add({"obs": [0.0, 1.0]})
        >>> rb = ReplayBuffer.open("close-example")
        >>> len(rb)
        1
        >>> rb.close()
        """
        self._following.close()
        self._rows.replays.close()  # first: their priorities belong in the storage
        prefetching, wiring, service = self._prefetching, self._wiring, self._service
        storage = wiring.storage
        wiring.gate.close(None if storage.closed else vars(storage).get("memory"))
        if prefetching is not None:
            prefetching.close()
        if not storage.closed:
            storage.detach(self)
        last = storage.closed or not storage.listeners
        wiring.moved()  # what was kept of the storage
        # The user's: ours are private.
        goes_on = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        goes_on |= {"sampler": wiring.sampler, "writer": wiring.writer}  # which refuse what needs the storage
        if last:
            goes_on |= {"storage": storage, "close": lambda: storage.close()}  # noqa: PLW0108 - of what it is then
        end(self, "the buffer was closed. Make another one, or ReplayBuffer.open the folder of its store.", **goes_on)
        if last:
            storage.close()
        service.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """Refuse sampling from now on, and end the threads of ``prefetch``. Repeatable.

        Args:
            timeout: seconds to wait for what threads are at; None: until it is done.

        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rb.shutdown()
        """
        self._wiring.gate.shut_down(self._wiring.storage.memory)
        if self._prefetching is not None:
            self._prefetching.close(timeout)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._service.reduced(self) or super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, object]:
        self._following.refuse("copy")
        if self._settings.unmade is not None:
            return dict(self.__dict__)
        storage = self._wiring.storage
        if fork.is_spawning():
            self._materialize()
            storage.hand_over()
        prefetching = self._prefetching
        prefetched = None if prefetching is None or storage.shared else prefetching.copy()  # first: it reads
        state = {name: value for name, value in self.__dict__.items() if name not in conf.AROUND_COMPONENTS}
        return state | {"_copied": (self._lanes.named, self._lanes.told, self._recipe.looked, prefetched)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        named, told, looked, prefetched = state.pop("_copied", (None,) * 4)
        self.__dict__.update(state, _settings=copy.copy(state["_settings"]))
        if self._settings.unmade is not None:
            conf.make_at_first_use(self)
            return
        self._wiring = wiring = copy.copy(self._wiring)
        wiring.gate = copy.copy(wiring.gate)
        wiring.connect(wiring.sampler, wiring.writer, self._settings.batch_size)
        self.assemble(named)
        wiring.storage.attach(self)
        self._lanes.told, self._recipe.looked = told, looked
        if wiring.is_apart:
            wiring.begin_apart()
        elif self._prefetching is not None and prefetched is not None:
            self._prefetching.restore(prefetched)

    # ---- names that TorchRL has ------------------------------------------------------------------------------------------

    service_backend: str = shows(lambda self: self._service.backend, 'Where rows are: ``"direct"``, or ``"ray"``.')
    transport_kind: str = shows(
        lambda self: self._service.transport, 'How: ``"direct"``, ``"shared"`` or ``"flight"``.'
    )
    start = conf.returns_itself("Returns the buffer: it runs already.")
    as_remote: ClassVar[Any] = classmethod(as_remote)
    client, clients = client, clients

    # ---- seeing it -----------------------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """Rows (``ndim > 1``: slots) written since the last :meth:`empty`; 0 for a writer that cannot write."""
        wiring = self._wiring
        return 0 if wiring.of_writer.read_only else wiring.storage.write_count

    def stats(self) -> dict[str, float]:
        """A flat dict of numbers: ``size, write_count, prefetch_queue_size, initialized, lanes, bytes``, when bounded ``capacity``
        and ``utilization``, and the store's ``void_rows, lapped_rows, redraws``, ``priority_updates_dropped``, ``field_updates`` and
        ``field_updates_dropped``; ``priority_mass``, ``drawable_rows`` and ``consumer_version`` of samplers that have them; of a
        :class:`PromptGroupSampler` ``groups``; of one that uses rows up or follows rules ``starved_draws``, those that found too few, and
        since the storage has its counts, of rows, ``used_rows``, ``evicted_rows``, those that were overwritten before they were used up,
        ``dropped_rows``, those that were removed or lost with their writer before that, and ``expired_rows``; of a
        :class:`NextFromFollowing`, ``final_observations_lost``, rows that it passes over as they were overwritten; the limits, as
        docs/flow-control.md says; of a buffer that follows checkpoints, ``followed_step``, ``followed_age`` in seconds and
        ``followed_damaged``, those that were passed over.

        Of tensor storages also what all processes of the store have counted: ``sample_count``, rows sampled, and ``replay_ratio``, those
        per row inserted, since the buffer was emptied or loaded; ``add_per_s`` and ``sample_per_s``, rows, over the last 10 to 20
        seconds; ``sample_wait_ms_p50`` and ``_p99``, how long :meth:`sample` took in the last two minutes in which it was called, to a
        fifth, from the first 256 calls of a minute and one in 32 of the others; ``checkpoint_age_s``, once a ``Checkpointer`` has
        saved. ``bytes_ram`` and ``bytes_disk`` are rows, tickets and indexes.
        Estimated from 4,096 rows are ``age_mean`` and ``age_p99``, in writes, ``priority_mean`` and ``priority_ess``, the number of
        equally likely rows that draws are as diverse as, beside ``priority_max``; and ``never_sampled_frac``, if ``usage_counted`` is 1, as
        :meth:`count_usage` was called. Buffers with ``readonly=True`` show these counts, and are not counted.

        Cost: O(lanes), and a look at 4,096 rows.

        A process that dies just as it counts a void row may leave ``void_rows`` one too high, and so ``len(rb)`` one too low, until
        the next process that opens the store alone counts them again. No row is hidden by that: draws and ``rb[:]`` see all.

        >>> import torch
        >>> from engram import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
        >>> rows = rb.extend({"obs": torch.zeros(10, 3)})
        >>> rb.stats()["size"], rb.stats()["capacity"]
        (10, 100)
        """
        if self._settings.unmade is not None:
            return dict.fromkeys(("size", "write_count", "prefetch_queue_size", "initialized"), 0)
        prefetched = 0 if self._prefetching is None else len(self._prefetching)
        return base.Display(self._wiring, self._settings).stats(prefetched) | self._following.stats()

    health, explain, count_usage = inspect.health, inspect.explain, inspect.count_usage
    add_field = add_field
    plot = cast("Plots", property(Plots, doc="Figures of the buffer, such as ``rb.plot.age()``: see docs/seeing.md."))


register(ReplayBuffer)
