"""The drop-in optimizer: torch's shape, steps on the servers."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from pserver.client.cluster import Cluster, current_cluster
from pserver.client.description import ModelDescription
from pserver.client.early_push import EarlyPush, is_compiled
from pserver.client.grad_scaling import GradScaling
from pserver.client.late_pull import LatePull
from pserver.client.model import SharedModel
from pserver.client.params import Named, Params, describe, in_groups, unnamed
from pserver.client.step_counts import ModelStatistics
from pserver.core.optimizers import STATE_OPTIONS, constructor_arguments, numeric_options, optimizer_name
from pserver.core.rules import GradientRules
from pserver.core.sync import Bsp, SyncPolicy
from pserver.errors import InvalidRequest
from pserver.types import StepResult
from pserver.wire.compress import Codec, NoCompression
from pserver.wire.tensors import element_type

logger = logging.getLogger(__name__)


class RemoteOptimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer whose step happens on the servers: `loss.backward(); opt.step(); opt.zero_grad()`.

    Making it registers the model: the first trainer's values win, and all others' parameters and buffers are
    overwritten with them. `step` sends what `.grad` holds when it is called; `.grad` stays this trainer's own.

    Args:
        optimizer_class: a class that servers know: torch.optim's, or one that was registered with `register_optimizer`.
        params: a module, or what torch's optimizers take: tensors, (name, tensor) pairs, or group dicts of either.
        args, kwargs: for `optimizer_class`.
        name: of the model in the cluster; trainers with the same name train together.
        sync: whose gradients make a round, `Bsp()` by default; see `Bsp`, `Ssp`, `Async`.
        buffers: what becomes of buffers such as BatchNorm's running statistics at each step: "lowest" gives everybody
            those of the lowest rank, "mean" the mean over trainers (integers: of the lowest rank), "local" leaves them.
        max_norm: limit of the global 2-norm of the *mean* gradient over all parameters and shards; `last_result` has
            the norm. None: no limit. May be changed at any time, like the two below; the lowest rank's count.
        clip_value: limit of the absolute value of each element of the mean gradient, after the norm.
        nonfinite: what to do if a gradient has NaN or infinite elements: "pass" steps all the same, as torch does;
            "skip" steps nothing, on all servers; "raise" steps nothing and raises on every trainer of the round.
        module: where names and buffers come from when `params` is not a module.
        compress: how gradients travel, for example `pserver.compress.BFloat16()`; the same on every trainer. Lossy ones
            that drop much want `ErrorFeedback` around them: `codec_state_dict` has what it keeps.
        pull_dtype: what parameters are rounded to on their way to every trainer, torch.float16 or torch.bfloat16; the
            servers keep theirs. None: nothing is lost.
        early_push: whether gradients are sent during the backward pass, bucket by bucket as they become ready; `step`
            sends what is left, and again what was changed since, as a GradScaler does. The result is the same.
        late_pull: whether `step` returns before the new parameters are there. Whoever looks at one through its module
            waits for it; a tensor that is held otherwise keeps its old values until the next forward pass of the module
            ends, or `wait`. What `step` would raise is raised there. Both are off where the module is compiled.
        cluster: the session; by default that of the enclosing `with pserver.connect()`.
        bucket_bytes: unit of cutting and sending; 0 chooses. A multiple of 64.
        replicas: how many other servers keep a copy of each shard, in step with it: so many may be lost at once, and
            training goes on with every acknowledged update.

    Raises:
        UnsupportedOptimizer: servers cannot run it. LayoutMismatch: another trainer's model differs.
        DeadlineExceeded: the model was not ready in time.

    Not thread-safe. `load_state_dict`, `add_param_group` and `broadcast_parameters` must be called on every trainer.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer_class: Any,
        params: Params,
        *args: Any,
        name: str = "model",
        sync: SyncPolicy | None = None,
        buffers: str = "lowest",
        max_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "pass",
        module: torch.nn.Module | None = None,
        compress: Codec | None = None,
        pull_dtype: torch.dtype | None = None,
        replicas: int = 0,
        early_push: bool = False,
        late_pull: bool = False,
        cluster: Cluster | None = None,
        bucket_bytes: int = 0,
        **kwargs: Any,
    ) -> None:
        self._name = optimizer_name(optimizer_class)
        if isinstance(params, torch.nn.Module):
            module = params
            params = [each for each in module.parameters() if each.requires_grad]
        self._make_local: Callable[[Any], torch.optim.Optimizer] = lambda groups: optimizer_class(
            groups, *args, **kwargs
        )
        local = self._make_local(params)
        self._model: SharedModel | None = None
        super().__init__(local.param_groups, local.defaults)
        self.max_norm, self.clip_value, self.nonfinite = max_norm, clip_value, nonfinite
        self._rules()  # refuses what no step could use
        if late_pull and module is None:
            raise InvalidRequest("late_pull watches a module's forward: pass the module itself, or module=")
        self._module = module
        self._cluster = cluster or current_cluster()
        self._shared_as: dict[str, Any] = {
            "name": name,
            "sync": sync or Bsp(),
            "buffers": buffers,
            "bucket_bytes": bucket_bytes,
            "compress": compress or NoCompression(),
            "pull_dtype": pull_dtype,
            "replicas": replicas,
        }
        self._registered: list[dict[str, object]] = []
        self._early: EarlyPush | None = None
        self._late: LatePull | None = None
        self._early_push, self._late_pull = early_push, late_pull
        self._model = SharedModel(self._cluster, self._describe())
        self._watch()
        # Torch warns of schedulers that are stepped before their optimizer; here others may have stepped it already.
        self._opt_called = self._model.round > 0

    # Steps

    @property
    def round(self) -> int:
        """Round of the parameters that this trainer holds: the number of updates decided until then, by anybody.

        A schedule that follows it is the same for trainers that join late, are skipped or refused:
        `while scheduler.last_epoch < optimizer.round: scheduler.step()`.
        """
        return self._shared().round

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int = 1, grad_scaler: Any = None) -> Any:
        """Steps with the mean of all trainers' gradients; the parameters are complete when it returns, or `late_pull`.

        Args:
            closure: called once, with gradients enabled; computes the loss.
            samples: weight of this trainer's gradient in the mean: the size of its batch, if batches differ.
            grad_scaler: torch.amp.GradScaler passes itself: call `scaler.step(optimizer)`. Gradients are unscaled; if
                any trainer's overflowed, nobody steps and the scale of every trainer backs off.

        Returns:
            What the closure returned; None without one. `last_result` says what became of the step.

        Raises:
            DeadlineExceeded: the round was not decided in time; names the trainers it waits for.
            RoundFailed, NonFiniteGradient: the policy says so; nothing was stepped, and the next step may succeed.
            ModelFailed: a server was lost. ServerUnavailable: a server cannot be reached. ServerErrors: several.
            InvalidRequest: the model has changed since it was registered, or its values since the last step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grad_scaler is None:
            if self._late is not None and not is_compiled(self._module):
                model = self._shared()
                model.begin_step(self._cluster.contexts.new_id(), self._gradients(), **self._committed(samples))
                self._late.begin()
            else:
                self._commit(self._gradients(), samples)
            return loss
        scaling = self._scaling
        overflow = scaling.unscale_(grad_scaler)
        try:
            result = self._commit(self._gradients(), samples, overflow)
        except BaseException:
            scaling.failed(grad_scaler)
            raise
        # A gradient that was refused has no round: what was found here is all that the scaler can go by.
        scaling.tell(grad_scaler, result.overflow if result.accepted else overflow)
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For backward passes whose gradients only accumulate: with `early_push` nothing is sent in the block."""
        with self._early.paused() if self._early is not None else nullcontext():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as in torch; what was sent of them without a step counts nowhere."""
        super().zero_grad(set_to_none)
        if self._early is not None and self._model is not None:
            self._early.drain()
            self._model.abandon_early()

    def wait(self) -> None:
        """With `late_pull`: returns when all parameters are those of the last step; raises as `step` does."""
        self._shared()

    def skip(self) -> None:
        """Takes part in a round without a gradient, for example on a trainer that has run out of data.

        Raises:
            InvalidRequest: under `Async`, where nobody waits for this trainer. And what `step` raises.
        """
        self._commit(None, 0)

    @property
    def last_result(self) -> StepResult | None:
        """What became of the last step whose outcome is known; None before the first."""
        return self._model.last_result if self._model is not None else None

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters]

    def _commit(self, gradients: list[torch.Tensor | None] | None, samples: int, overflow: bool = False) -> StepResult:
        model = self._shared()
        return model.step(self._cluster.contexts.new_id(), gradients, overflow=overflow, **self._committed(samples))

    def _committed(self, samples: int) -> dict[str, Any]:
        """What a commit says beside its gradients."""
        options = [numeric_options(self._name, group) for group in self.param_groups]
        return {"samples": samples, "options": options, "rules": self._rules()}

    def statistics(self) -> ModelStatistics:
        """What became of this trainer's steps: counts, and a histogram of staleness."""
        return self._shared().statistics()

    # State

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, read from the servers, in torch's format: plain torch can load it, and the reverse.

        Tensors are on the CPU. Parameters in half precision have their float32 master in it as `master_param`.
        """
        states = self._shared().pull_state()
        try:
            self.state.update({self._tensors[index]: state for index, state in states.items()})
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Puts a state in torch's format on the servers, together with the parameters and buffers as they are here.

        To go on from a checkpoint, load the module first. Every trainer must call it; the lowest rank's counts.

        Raises:
            ValueError: the groups do not fit, as torch says it. InvalidRequest: a state that servers cannot take.
            DeadlineExceeded: names the ranks that did not call.
        """
        model = self._shared()
        before = [dict(group) for group in self.param_groups]
        seen: list[Mapping[str, Any]] = []
        # Hooks may replace the state; this one comes last.
        last = self.register_load_state_dict_pre_hook(lambda _, state: seen.append(state))
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            last.remove()
        local = self._make_local([{**group, "params": list(group["params"])} for group in self.param_groups])
        # The class itself knows what older checkpoints lack.
        local.__setstate__({"state": self.state, "param_groups": self.param_groups})
        states = {self._indices[parameter]: dict(state) for parameter, state in local.state.items()}
        self.param_groups = local.param_groups
        self.state.clear()
        states.update(self._precise(seen[-1]))
        try:
            model.replace(self._describe(), states)
        except BaseException:
            self.param_groups = before
            raise
        self._watch()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, with parameters that were in none until now; rounds and the other groups' state go on.

        Every trainer must call it in the same place.

        Raises:
            InvalidRequest: the module lacks a parameter. DeadlineExceeded: names the ranks that did not call.
        """
        if self._model is None:
            super().add_param_group(param_group)
            return
        model = self._shared()
        model.catch_up()
        states = {self._tensors[index]: state for index, state in model.pull_state().items()}
        before = list(self.param_groups)
        super().add_param_group(param_group)
        try:
            description = self._describe()
            model.replace(description, {self._indices[each]: state for each, state in states.items()})
        except BaseException:
            self.param_groups[:] = before
            self._describe()
            raise
        self._watch()

    def broadcast_parameters(self) -> None:
        """Makes the lowest rank's parameters and buffers everybody's and the servers'; optimizer state goes on.

        Every trainer must call it, after parameters were changed on purpose (loaded, clamped, averaged).

        Raises:
            DeadlineExceeded: names the ranks that did not call.
        """
        model = self._shared()
        model.replace(self._describe(), model.pull_state())

    def codec_state_dict(self) -> dict[str, torch.Tensor]:
        """What this trainer's codec remembers (residuals, factors): own tensors, to be saved beside `state_dict`.

        Every trainer has its own. The last step counts as settled.
        """
        state = self._codec_state()
        return {} if state is None else dict(state.state_dict())

    def load_codec_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Goes on with what `codec_state_dict` gave on this trainer; copies it.

        Raises:
            InvalidRequest: the codec was another one.
        """
        state = self._codec_state()
        if state is not None:
            state.load_state_dict(state_dict)
        elif state_dict:
            raise InvalidRequest(f"this codec remembers nothing, but the state has {sorted(state_dict)[:4]}")

    def _codec_state(self) -> Any:
        """As of the last step: what was encoded since then is taken back, and left to the next one."""
        model = self._shared()
        model.abandon_early()
        return model.codec_state

    def _shared(self) -> SharedModel:
        """The model, once nothing is being done to it beside this thread, and its tensors have their values."""
        assert self._model is not None
        if self._early is not None:
            self._early.drain()
        self._complete()
        return self._model

    def _complete(self) -> None:
        assert self._model is not None
        try:
            self._model.complete()
        finally:
            if self._late is not None:
                self._late.end()

    def _watch(self) -> None:
        """Sees to it that the model as it is now is pushed early and pulled late, if that is wanted."""
        model = self._model
        assert model is not None
        for watching in (self._early, self._late):
            if watching is not None:
                watching.close()
        self._early = self._late = None
        if is_compiled(self._module):
            if self._early_push or self._late_pull:
                logger.warning("the module is compiled: early_push and late_pull are off")
            return
        if self._early_push:
            self._early = EarlyPush(model.layout, model.stepped, model.send_early, self._cluster.worker)
        if self._late_pull:
            assert self._module is not None
            indices = {tensor: index for index, tensor in model.exchanged.items()}
            self._late = LatePull(self._module, indices, model.take, self._complete)
            self._cluster.complete_at_exit(self._complete)

    def _describe(self) -> ModelDescription:
        named: Named = unnamed(self.param_groups) if self._module is None else list(self._module.named_parameters())
        self._parameters = in_groups(named, self.param_groups)
        self._tensors = [parameter for _, parameter in named]
        self._indices = {parameter: index for index, parameter in enumerate(self._tensors)}
        self._scaling = GradScaling(self, self._parameters)
        present = [constructor_arguments(self._name, group) for group in self.param_groups]
        # As they were at first: a trainer that joins later has not moved along the schedule.
        self._registered = self._registered[: len(present)] + present[len(self._registered) :]
        deciding = STATE_OPTIONS.get(self._name, ())
        groups = [
            first | {key: now[key] for key in deciding} for first, now in zip(self._registered, present, strict=True)
        ]
        return describe(self._name, self.param_groups, groups, named, self._module, **self._shared_as)

    def _rules(self) -> GradientRules:
        return GradientRules(max_norm=self.max_norm, clip_value=self.clip_value, nonfinite=self.nonfinite)

    def _precise(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """The state of parameters in half precision as it was saved: torch casts it to their dtype."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        return {
            self._indices[parameter]: dict(state_dict["state"][key])
            for key, parameter in zip(saved, ours, strict=True)
            if key in state_dict["state"] and element_type(parameter.dtype).master != parameter.dtype
        }
