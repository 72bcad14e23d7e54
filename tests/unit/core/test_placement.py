from itertools import pairwise

from core_builders import tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.placement import place_buckets
from pserver.wire.layout import build_layout

sizes = st.lists(st.integers(1, 2000), min_size=1, max_size=20)
num_servers = st.integers(1, 30)


def layout_of(sizes, bucket_bytes=256, *, whole=False):
    specs = [tensor_spec(f"t{i}", size) for i, size in enumerate(sizes)]
    return build_layout(specs, bucket_bytes, whole_tensors=whole)


def loads(layout, placed):
    return [sum(layout.buckets[index].num_bytes for run in runs for index in run) for runs in placed]


@given(sizes, num_servers, st.booleans())
def test_every_bucket_has_one_server(sizes, num_servers, whole):
    layout = layout_of(sizes, whole=whole)
    placed = place_buckets(layout, num_servers)
    assert len(placed) == num_servers
    assert sorted(bucket for runs in placed for run in runs for bucket in run) == list(range(len(layout.buckets)))


@given(sizes, num_servers, st.booleans())
def test_runs_of_a_server_ascend_with_gaps_between_and_none_is_empty(sizes, num_servers, whole):
    for runs in place_buckets(layout_of(sizes, whole=whole), num_servers):
        borders = [border for run in runs for border in (run.start, run.stop)]
        assert all(before < after for before, after in pairwise(borders))


@given(sizes, num_servers)
def test_buckets_that_are_cut_anywhere_go_in_order_and_one_run_to_a_server(sizes, num_servers):
    layout = layout_of(sizes)
    placed = place_buckets(layout, num_servers)
    assert all(len(runs) <= 1 for runs in placed)
    assert [bucket for runs in placed for run in runs for bucket in run] == list(range(len(layout.buckets)))


@given(sizes, num_servers)
def test_runs_are_equal_in_bytes_up_to_one_bucket(sizes, num_servers):
    layout = layout_of(sizes)
    total = sum(bucket.num_bytes for bucket in layout.buckets)
    for num_bytes in loads(layout, place_buckets(layout, num_servers)):
        assert abs(num_bytes - total / num_servers) <= layout.bucket_bytes


def test_one_huge_tensor_spreads_over_every_server():
    layout = build_layout([tensor_spec("embedding", 1000, 1000)])
    sizes = loads(layout, place_buckets(layout, 4))
    assert sum(sizes) == 4_000_000
    assert max(sizes) - min(sizes) <= 2 * layout.bucket_bytes


def test_with_more_servers_than_buckets_some_own_nothing():
    assert sorted(place_buckets(layout_of([16]), 3)) == [(), (), (range(1),)]


@given(sizes, st.booleans())
def test_one_server_owns_everything(sizes, whole):
    layout = layout_of(sizes, whole=whole)
    assert place_buckets(layout, 1) == [(range(len(layout.buckets)),)]


@given(sizes, num_servers)
def test_with_whole_tensors_no_server_has_more_than_a_bucket_over_the_least_loaded(sizes, num_servers):
    layout = layout_of(sizes, whole=True)
    found = loads(layout, place_buckets(layout, num_servers))
    assert max(found) - min(found) <= max(bucket.num_bytes for bucket in layout.buckets)


def test_the_largest_whole_tensors_are_placed_first_and_ties_go_to_the_lowest_server():
    layout = layout_of([64, 640, 128, 512, 64], 64, whole=True)
    assert place_buckets(layout, 3) == [(range(1, 2),), (range(3, 4),), (range(1), range(2, 3), range(4, 5))]
    assert place_buckets(layout_of([64, 64, 64], 64, whole=True), 2) == [(range(1), range(2, 3)), (range(1, 2),)]
