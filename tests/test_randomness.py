import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jem_robust.randomness import PURPOSES, NoiseKey, SeededCalls, SeedStack, as_seed, global_rng, philox
from tests.worlds import NoisyNet, images, smooth_cnn

CPU = torch.device("cpu")


def words(text):
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def normal(seed=0, purpose="plain", ids=0, draws=0, chains=0, step=0, shape=(64,), dtype=torch.float64):
    ids, draws, chains = (torch.as_tensor(v, dtype=torch.int64).reshape(-1) for v in (ids, draws, chains))
    return NoiseKey(seed, purpose, ids, draws, chains).normal(step, shape, dtype)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox(words(counter), words(key)) == words(expected)


def test_philox_agrees_with_an_implementation_in_python_integers():
    rng = np.random.default_rng(0)
    for _ in range(20):
        c, k = [int(v) for v in rng.integers(0, 2**32, 4)], [int(v) for v in rng.integers(0, 2**32, 2)]
        got = philox(tuple(torch.tensor([v]) for v in c), tuple(torch.tensor([v]) for v in k))
        for _ in range(10):
            p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        assert [int(v) for v in got] == c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_standard_normal(dtype):
    sample = normal(ids=torch.arange(200), draws=torch.zeros(200).long(), chains=torch.zeros(200).long(),
                    shape=(1000,), dtype=dtype).double().flatten().numpy()  # fmt: skip
    n = sample.size
    assert abs(sample.mean()) < 4 / n**0.5
    assert abs(sample.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs(stats.skew(sample)) < 4 * (6 / n) ** 0.5
    assert abs(stats.kurtosis(sample)) < 4 * (24 / n) ** 0.5
    assert stats.kstest(sample, "norm").pvalue > 1e-3


def test_noise_across_rows_is_normal_too():
    """The first component over ids, draws, chains, steps and seeds, which a weak key schedule would correlate."""
    many = torch.arange(20_000)
    zero = torch.zeros_like(many)
    by = {
        "id": normal(ids=many, draws=zero, chains=zero, shape=(1,)),
        "draw": normal(ids=zero, draws=many, chains=zero, shape=(1,)),
        "chain": normal(ids=zero, draws=zero, chains=many, shape=(1,)),
        "step": torch.cat([normal(step=t, shape=(1,)) for t in range(2000)]),
        "seed": torch.cat([normal(seed=s, shape=(1,)) for s in range(2000)]),
    }
    for name, sample in by.items():
        sample = sample.flatten().numpy()
        assert stats.kstest(sample, "norm").pvalue > 1e-3, name
        assert abs(np.corrcoef(sample[1:], sample[:-1])[0, 1]) < 4 / sample.size**0.5, name


@pytest.mark.parametrize("axis", ["ids", "draws", "chains", "step", "purpose", "seed"])
def test_noise_is_independent_over_every_part_of_its_key(axis):
    values = list(PURPOSES) if axis == "purpose" else [0, 1, 2, 3, 7, 64, 1000]
    size = 20_000
    sample = np.stack([normal(**{axis: v}, shape=(size,)).numpy()[0] for v in values])
    correlation = np.corrcoef(sample) - np.eye(len(values))
    assert np.abs(correlation).max() < 4.5 / size**0.5
    squares = np.corrcoef(sample**2) - np.eye(len(values))
    assert np.abs(squares).max() < 4.5 / size**0.5


def test_no_two_keys_share_noise():
    """Also keys whose parts could be swapped or carried over into each other."""
    seen = set()
    keys = [
        (seed, purpose, i, d, c, t)
        for seed in (0, 1, 2**32, -1) for purpose in PURPOSES for i in (0, 1, 2**32) for d in (0, 1, 2**32)
        for c in (0, 1) for t in (0, 1)
    ]  # fmt: skip
    for seed, purpose, i, d, c, t in keys:
        seen.add(tuple(normal(seed, purpose, i, d, c, t, shape=(2,)).flatten().tolist()))
    assert len(seen) == len(keys)


def test_components_within_a_row_differ():
    row = normal(shape=(3, 7, 7)).flatten()
    assert row.unique().numel() == row.numel()


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=12),
    pick=st.data(),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
)
def test_noise_does_not_depend_on_the_composition_of_the_batch(ids, pick, size, dtype):
    ids = torch.tensor(ids)
    draws, chains = ids % 5, ids % 3
    whole = normal(3, "attack", ids, draws, chains, 4, (size,), dtype)
    part = torch.tensor(pick.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=8)))
    assert torch.equal(normal(3, "attack", ids[part], draws[part], chains[part], 4, (size,), dtype), whole[part])


def test_rows_of_images_lie_beside_each_other_and_can_be_cut():
    key = NoiseKey.for_images(5, "judge", torch.tensor([7, 9]), torch.tensor([0, 4]), 3)
    assert key.ids.tolist() == [7] * 3 + [9] * 3
    assert key.draws.tolist() == [0] * 3 + [4] * 3
    assert key.chains.tolist() == [0, 1, 2] * 2
    whole = key.normal(1, (2, 3), torch.float64)
    assert torch.equal(key.rows(slice(2, 5)).normal(1, (2, 3), torch.float64), whole[2:5])


def test_no_rows_give_no_noise():
    assert normal(ids=[], draws=[], chains=[], shape=(1, 2, 2)).shape == (0, 1, 2, 2)


def test_the_global_rng_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = normal(seed=4)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, normal(seed=4))


def test_global_rng_is_seeded_inside_and_put_back_also_after_an_error():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with global_rng(5, CPU):
        first = torch.rand(3)
    with pytest.raises(ZeroDivisionError), global_rng(5, CPU):
        1 / int(not torch.equal(first, torch.rand(3)))
    with global_rng(None, CPU):
        torch.rand(1)
    assert torch.equal(before, torch.get_rng_state())


def test_global_seeds_differ_by_step_draw_and_image_but_not_by_call():
    def seed(i, d, t):
        return NoiseKey(0, "plain", torch.tensor([i, 3]), torch.tensor([d, d]), torch.tensor([0, 0])).global_seed(t)

    seeds = [seed(i, d, t) for i in range(4) for d in range(4) for t in range(4)]
    assert len(set(seeds)) == 64
    assert seeds[5] == seed(0, 1, 1)


def test_networks_that_draw_from_the_global_rng_are_found():
    x = images(1)
    before = torch.get_rng_state()
    assert not SeededCalls().probe([smooth_cnn()], x)
    calls = SeededCalls()
    with pytest.warns(UserWarning, match="switch its own randomness off"):
        assert calls.probe([smooth_cnn(), NoisyNet()], x)
    assert calls.probe([], x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, -3, 2**70, np.int32(7), np.uint64(2**63), np.int64(-1)])
def test_any_integer_is_a_seed(seed):
    assert as_seed(seed) == int(seed)
    assert torch.equal(normal(seed=seed), normal(seed=int(seed)))


@pytest.mark.parametrize("seed", [1.5, "1", None])
def test_other_seeds_are_refused(seed):
    with pytest.raises(TypeError, match="expected an integer seed"):
        normal(seed=seed)


def test_bad_keys_are_refused():
    with pytest.raises(ValueError, match="purpose"):
        normal(purpose="fun")
    with pytest.raises(ValueError, match="one length"):
        normal(ids=[1, 2])


def test_a_seed_stack_may_be_entered_again_from_within():
    stack = []
    block = SeedStack("owner", stack, 3)
    with block as owner, block:
        assert owner == "owner"
        assert stack == [3, 3]
    with block:
        assert stack == [3]
    assert stack == []
