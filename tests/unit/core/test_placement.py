from core_builders import tensor_spec
from hypothesis import given
from hypothesis import strategies as st

from pserver.core.placement import place_buckets
from pserver.wire.layout import build_layout

sizes = st.lists(st.integers(1, 2000), min_size=1, max_size=20)
num_servers = st.integers(1, 30)


def layout_of(sizes, bucket_bytes=256):
    return build_layout([tensor_spec(f"t{i}", size) for i, size in enumerate(sizes)], bucket_bytes)


@given(sizes, num_servers)
def test_runs_partition_the_buckets_in_order(sizes, num_servers):
    layout = layout_of(sizes)
    runs = place_buckets(layout, num_servers)
    assert len(runs) == num_servers
    assert [bucket for run in runs for bucket in run] == list(range(len(layout.buckets)))


@given(sizes, num_servers)
def test_runs_are_equal_in_bytes_up_to_one_bucket(sizes, num_servers):
    layout = layout_of(sizes)
    total = sum(bucket.num_bytes for bucket in layout.buckets)
    for run in place_buckets(layout, num_servers):
        num_bytes = sum(layout.buckets[index].num_bytes for index in run)
        assert abs(num_bytes - total / num_servers) <= layout.bucket_bytes


def test_one_huge_tensor_spreads_over_every_server():
    layout = build_layout([tensor_spec("embedding", 1000, 1000)])
    sizes = [sum(layout.buckets[index].num_bytes for index in run) for run in place_buckets(layout, 4)]
    assert sum(sizes) == 4_000_000
    assert max(sizes) - min(sizes) <= 2 * layout.bucket_bytes


def test_with_more_servers_than_buckets_some_own_nothing():
    runs = place_buckets(layout_of([16]), 3)
    assert sorted(map(len, runs)) == [0, 0, 1]


@given(sizes)
def test_one_server_owns_everything(sizes):
    layout = layout_of(sizes)
    assert place_buckets(layout, 1) == [range(len(layout.buckets))]
