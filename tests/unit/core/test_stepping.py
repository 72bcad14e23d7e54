import inspect

import pytest
import torch
from core_builders import empty_flats, tensor_spec, view_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pserver.core.optimizers import OPTIMIZERS, OptimizerEntry, constructor_arguments, numeric_options
from pserver.core.stepping import BucketStepper
from pserver.errors import InternalError, UnsupportedOptimizer
from pserver.wire.layout import build_layout

RAGGED = ((7,), (16,), (33,), (1,), (), (1000,), (16, 16), (3, 5))
MATRICES = ((7, 3), (16, 4), (33, 1), (1, 1), (40, 10), (16, 16), (3, 5), (4, 8))
NUM_STEPS = 5
CONFIGURATIONS = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD-weight_decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    "SGD-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "SGD-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": ("Adam", {"lr": 0.01}),
    "Adam-amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01, "betas": (0.8, 0.99)}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.3, "lr_decay": 0.01, "weight_decay": 0.1}),
    "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "Adadelta": ("Adadelta", {"weight_decay": 0.1}),
    "NAdam": ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"maximize": True}),
    "Adamax": ("Adamax", {"weight_decay": 0.1}),
    "ASGD": ("ASGD", {"lr": 0.1, "t0": 1.0, "weight_decay": 0.1}),
    "Rprop": ("Rprop", {}),
    "Adafactor": ("Adafactor", {"weight_decay": 0.1}),
    "Adafactor-eps": ("Adafactor", {"eps": (1e-20, 1e-3), "maximize": True}),
    "Muon": ("Muon", {"lr": 0.1}),
    "Muon-adjust_lr": ("Muon", {"adjust_lr_fn": "match_rms_adamw", "nesterov": False}),
}
CONFIGURATIONS = {key: value for key, value in CONFIGURATIONS.items() if value[0] in OPTIMIZERS}
WHOLE = [key for key, (name, _) in CONFIGURATIONS.items() if not OPTIMIZERS[name].elementwise]
IMPLEMENTATIONS = {"fused": {"fused": True}, "loop": {"foreach": False}, "foreach": {"foreach": True}}


def cases():
    """Every configuration in every implementation that torch has of it."""
    for configuration, (name, _) in CONFIGURATIONS.items():
        entry = OPTIMIZERS[name]
        if "foreach" not in inspect.signature(entry.cls).parameters:
            yield configuration, "only"
            continue
        for implementation in IMPLEMENTATIONS:
            if implementation != "fused" or entry.fused_on_cpu:
                yield configuration, implementation


#: For each step the tensors without a gradient.
ABSENCES = {
    "never": lambda step: set(),
    "some always and some from the third step on": lambda step: {1, 2} if step < 2 else {1, 2, 0, 5},
    "until the third step": lambda step: {0, 3, 5} if step < 2 else set(),
    "in the third step only": lambda step: {0, 3, 5} if step == 2 else set(),
    "alternating": lambda step: {0, 2, 5} if step % 2 else {1, 4, 6},
    "all in one step": lambda step: set(range(len(RAGGED))) if step == 2 else set(),
}

#: Those in which units are split, and stepped with and without state.
TELLING_ABSENCES = ("until the third step", "alternating")

each_case = pytest.mark.parametrize(("configuration", "implementation"), list(cases()))
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def one_thread(same_threads):
    """Threads that meet after every small operation take most of the time when all cores are busy."""
    torch.set_num_threads(1)


class Pair:
    """A model in buckets, each with its stepper, and the same tensors with one torch optimizer each."""

    def __init__(self, name, options, shapes=RAGGED, *, bucket_bytes=0, dtype=torch.float32):
        self._generator = torch.Generator().manual_seed(11)
        self.name = name
        self.shapes = shapes
        self.layout = build_layout(
            [tensor_spec(f"t{i}", *shape, dtype=dtype) for i, shape in enumerate(shapes)],
            bucket_bytes,
            whole_tensors=not OPTIMIZERS[name].elementwise,
        )
        (self.values,) = empty_flats(self.layout)
        self.expected = [torch.nn.Parameter(self._random(shape, dtype)) for shape in shapes]
        for index, tensor in enumerate(self.expected):
            self.view(self.values, index).copy_(tensor.detach())
        self.local = [OPTIMIZERS[name].cls([tensor], **options) for tensor in self.expected]
        self.group = constructor_arguments(name, self.local[0].param_groups[0])
        self.steppers = self.new_steppers()

    def new_steppers(self):
        """One for each bucket, over the present values and without state."""
        return [
            BucketStepper(
                self.name,
                self.group,
                self.values[bucket.start : bucket.stop],
                segments,
                [self.shapes[segment.tensor] for segment in segments] if self.layout.whole_tensors else None,
            )
            for bucket, segments in zip(self.layout.buckets, self.layout.segments, strict=True)
        ]

    def _random(self, shape, dtype):
        return torch.randn(shape, dtype=dtype, generator=self._generator)

    def view(self, flat, index):
        return view_of([flat], self.layout, index)

    def step(self, absent=frozenset(), **changed_options):
        """One step on both sides with the same random gradients."""
        gradients = torch.zeros_like(self.values)
        for index, (tensor, optimizer) in enumerate(zip(self.expected, self.local, strict=True)):
            optimizer.param_groups[0].update(changed_options)
            tensor.grad = None
            if index not in absent:
                tensor.grad = self._random(tensor.shape, tensor.dtype)
                self.view(gradients, index).copy_(tensor.grad)
            optimizer.step()
        options = numeric_options(self.name, self.local[0].param_groups[0])
        for bucket, stepper in zip(self.layout.buckets, self.steppers, strict=True):
            stepper.step_(gradients[bucket.start : bucket.stop].clone(), frozenset(absent), options)

    def different(self):
        """The tensors whose bits differ."""
        return [
            index
            for index, tensor in enumerate(self.expected)
            if not torch.equal(self.view(self.values, index), tensor)
        ]

    def counts(self):
        """Every step count that servers keep for a tensor; a tensor cut over buckets has several."""
        counts = [set() for _ in self.expected]
        for stepper in self.steppers:
            for piece in stepper.state_pieces():
                if piece.key == "step":
                    counts[piece.tensor].add(int(piece.value))
        return counts


def pair(configuration, implementation, **fields):
    name, options = CONFIGURATIONS[configuration]
    if name == "Muon":
        fields["shapes"] = MATRICES
    return Pair(name, {**options, **IMPLEMENTATIONS.get(implementation, {})}, **fields)


@pytest.mark.parametrize(
    ("configuration", "implementation", "absence"),
    [
        (configuration, implementation, absence)
        for configuration, implementation in cases()
        for absence in ABSENCES
        if configuration.startswith(("SGD", "Adam-", "AdamW", "Adagrad")) or absence in TELLING_ABSENCES
    ],
)
@pytest.mark.parametrize("bucket_bytes", [0, 1024], ids=["whole", "cut"])
def test_steps_equal_torch_s_own_to_the_bit(configuration, implementation, absence, bucket_bytes):
    both = pair(configuration, implementation, bucket_bytes=bucket_bytes)
    for step in range(NUM_STEPS):
        both.step(ABSENCES[absence](step))
        assert both.different() == []


@pytest.mark.parametrize("configuration", [each for each, kind in cases() if kind == "fused"])
def test_without_a_choice_steps_equal_torch_s_fused_ones(configuration):
    name, options = CONFIGURATIONS[configuration]
    both = Pair(name, options)
    fused = Pair(name, {**options, "fused": True})
    for _ in range(3):
        both.step()
        fused.step()
    assert torch.equal(both.values, fused.values)


@each_case
def test_large_tensors_that_torch_splits_over_threads_equal_torch_s_own(configuration, implementation):
    torch.set_num_threads(2)
    if configuration in WHOLE:
        both = pair(configuration, implementation)
    else:
        shapes = ((200_003,), (16_384,), (16_384,), (16_400,), (33,))
        both = pair(configuration, implementation, shapes=shapes, bucket_bytes=1 << 18)
    for _ in range(2):
        both.step()
    assert both.different() == []


@each_case
def test_double_precision_equals_torch_s_own(configuration, implementation):
    both = pair(configuration, implementation, dtype=torch.float64, bucket_bytes=256)
    for step in range(3):
        both.step({0, 5} if step == 1 else set())
    assert both.different() == []


@each_implementation
def test_options_that_schedulers_change_are_used_from_the_next_step_on(implementation):
    both = pair("SGD-momentum", implementation)
    for lr, momentum in ((0.1, 0.9), (0.05, 0.8), (0.0, 0.7)):
        both.step(lr=lr, momentum=momentum)
    assert both.different() == []
    both = pair("Adam", implementation)
    for lr, beta in ((0.1, 0.9), (0.05, 0.8), (0.0, 0.7)):
        both.step(lr=lr, betas=(beta, 0.99))
    assert both.different() == []


@each_implementation
@pytest.mark.parametrize("bucket_bytes", [0, 64], ids=["whole", "cut"])
def test_each_parameter_has_its_own_step_count(implementation, bucket_bytes):
    both = pair("Adam", implementation, bucket_bytes=bucket_bytes)
    present = [0] * len(RAGGED)
    for absent in ({0}, {0, 5}, set(), {1, 2, 5}, {0}):
        both.step(absent)
        present = [count + (index not in absent) for index, count in enumerate(present)]
        assert both.counts() == [{count} if count else set() for count in present]


@settings(max_examples=25)
@given(
    st.lists(st.frozensets(st.integers(0, len(RAGGED) - 1)), min_size=1, max_size=6),
    st.sampled_from([0, 64, 320]),
    st.sampled_from(list(cases())),
)
def test_any_tensors_may_be_absent_in_any_step(absences, bucket_bytes, case):
    both = pair(*case, bucket_bytes=bucket_bytes)
    for absent in absences:
        both.step(absent)
    assert both.different() == []


@each_implementation
def test_padding_between_tensors_is_not_stepped(implementation):
    both = pair("SGD-weight_decay", implementation, shapes=((7,), (3,)))
    both.values[7:16] = 5.0
    both.step()
    assert both.values[7:16].tolist() == [5.0] * 9


def test_a_step_takes_no_gradient_over_into_the_next_one():
    both = pair("SGD", "fused", shapes=((16,),))
    both.step()
    before = both.values.clone()
    both.step({0})
    assert torch.equal(both.values, before)


COMPLEX = [
    (configuration, implementation)
    for configuration, implementation in cases()
    if configuration not in WHOLE and implementation != "fused"
]


@pytest.mark.parametrize(("configuration", "implementation"), COMPLEX)
def test_complex_parameters_equal_torch_s_own(configuration, implementation):
    both = pair(configuration, implementation, dtype=torch.complex64, bucket_bytes=256)
    for step in range(3):
        both.step({0, 5} if step == 1 else set())
    assert both.different() == []
    assert all(tensor.isfinite().all() for tensor in both.expected)


@pytest.mark.parametrize("configuration", WHOLE)
def test_optimizers_of_whole_tensors_need_their_shapes(configuration):
    both = pair(configuration, "only")
    with pytest.raises(InternalError, match="expected the shapes"):
        BucketStepper(both.name, both.group, both.values, both.layout.segments[0])


def test_a_bucket_without_any_gradient_is_not_stepped_at_all():
    """A user's class may count its calls, or may not like a step without a gradient."""

    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            assert any(param.grad is not None for group in self.param_groups for param in group["params"])
            super().step(closure)

    both = Pair("SGD", {"lr": 0.1}, shapes=((16,), (16,)))
    both.steppers[0]._optimizer.__class__ = Picky
    for absent in ({0}, {0, 1}, set()):
        both.step(absent)
    assert both.different() == []


class Lazy(torch.optim.Optimizer):
    """Keeps a value that is neither of the parameter's shape nor a single number."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param]["pair"] = torch.zeros(2)


def test_a_class_that_is_wrongly_called_element_wise_is_refused_where_its_state_would_be_cut(monkeypatch):
    entry = OptimizerEntry(cls=Lazy, fused_on_cpu=False, elementwise=True)
    monkeypatch.setitem(OPTIMIZERS, "stepping.Lazy", entry)
    both = Pair("stepping.Lazy", {}, shapes=((16,), (16,)))
    both.step()
    with pytest.raises(UnsupportedOptimizer, match=r"'pair' of shape \[2\].*elementwise=False"):
        both.step({0})
