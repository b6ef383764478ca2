"""The op TopLogprobs: numpy's choice and log-probabilities, whatever the width, the ties, the instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.graphs.native import offered_instruction_sets, session_of_one_op

ISAS = offered_instruction_sets()
TYPES = {"table": TensorProto.INT64, "ids": TensorProto.INT64}


def top_logprobs(
    logits: np.ndarray, k: int, table: np.ndarray | None = None, *, isa: str = "", threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    inputs = ["logits", *(["table"] if table is not None else [])]
    session = session_of_one_op("TopLogprobs", inputs, ["ids", "logprobs"], TYPES, {"k": k}, isa=isa, threads=threads)
    ids, logprobs = session.run(None, {"logits": logits} | ({"table": table} if table is not None else {}))
    return ids, logprobs


def reference(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    exact = logits.astype(np.float64)
    highest = exact.max(axis=1, keepdims=True)
    log_sum = highest + np.log(np.exp(exact - highest).sum(axis=1, keepdims=True))
    return ids, np.take_along_axis(exact - log_sum, ids, axis=1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("columns", "k"), [(1, 1), (8, 8), (15, 3), (16, 1), (17, 17), (128, 8), (129, 8), (1000, 4), (8192, 8)]
)
def test_it_is_numpy_s(columns: int, k: int, isa: str) -> None:
    random = np.random.default_rng(columns)
    for scale in (0.1, 3.0, 40.0):
        logits = (random.standard_normal((5, columns)) * scale).astype(np.float32)
        ids, logprobs = top_logprobs(logits, k, isa=isa)
        expected_ids, expected = reference(logits, k)
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_allclose(logprobs, expected, rtol=2e-6, atol=2e-5)
        assert (logprobs <= 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_a_tie_goes_to_the_lower_column(isa: str) -> None:
    random = np.random.default_rng(0)
    for choices in ((0.0,), (0.0, 1.0), (-3.0, 0.0, 0.5, 2.0)):
        logits = random.choice(choices, (7, 517)).astype(np.float32)
        for k in (1, 2, 8, 64):
            ids, logprobs = top_logprobs(logits, k, isa=isa)
            expected_ids, expected = reference(logits, k)
            np.testing.assert_array_equal(ids, expected_ids)
            np.testing.assert_allclose(logprobs, expected, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_falling_and_rising_rows(isa: str) -> None:
    rising = np.arange(1000, dtype=np.float32) / 100
    for logits in (rising[None], rising[None, ::-1].copy()):
        ids, _ = top_logprobs(logits, 8, isa=isa)
        np.testing.assert_array_equal(ids, reference(logits, 8)[0])


def test_the_table_says_what_a_column_is_called() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 50)).astype(np.float32)
    table = np.random.default_rng(2).permutation(1000)[:50].astype(np.int64)
    ids, logprobs = top_logprobs(logits, 5, table)
    plain_ids, plain_logprobs = top_logprobs(logits, 5)
    np.testing.assert_array_equal(ids, table[plain_ids])
    np.testing.assert_array_equal(logprobs, plain_logprobs)


def test_a_row_s_bits_are_its_own_and_those_of_any_threads() -> None:
    logits = np.random.default_rng(3).standard_normal((12, 8192)).astype(np.float32)
    ids, logprobs = top_logprobs(logits, 8, threads=3)
    for row in range(len(logits)):
        alone_ids, alone = top_logprobs(logits[row : row + 1], 8)
        np.testing.assert_array_equal(ids[row], alone_ids[0])
        np.testing.assert_array_equal(logprobs[row], alone[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("column", [0, 5, 300])
def test_a_nan_makes_its_row_nan_and_no_other(column: int, isa: str) -> None:
    logits = np.random.default_rng(4).standard_normal((3, 301)).astype(np.float32)
    logits[1, column] = np.nan
    ids, logprobs = top_logprobs(logits, 4, isa=isa)
    assert np.isnan(logprobs[1]).all()
    assert ((ids >= 0) & (ids < 301)).all()
    others = np.array([0, 2])
    np.testing.assert_array_equal(ids[others], reference(logits[others], 4)[0])
    assert np.isfinite(logprobs[others]).all()


def test_minus_infinity_is_a_token_that_cannot_be() -> None:
    logits = np.full((1, 40), -np.inf, np.float32)
    logits[0, [7, 30]] = 1.0, 2.0
    ids, logprobs = top_logprobs(logits, 3)
    assert ids[0].tolist() == [30, 7, 0]
    np.testing.assert_allclose(np.exp(logprobs[0]), [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1)), 0], rtol=1e-6)


def test_no_rows_and_misfits() -> None:
    ids, logprobs = top_logprobs(np.zeros((0, 9), np.float32), 3)
    assert ids.shape == logprobs.shape == (0, 3)
    with pytest.raises(Exception, match="TopLogprobs: k is 10, but a row has 9 logits"):
        top_logprobs(np.zeros((1, 9), np.float32), 10)
    with pytest.raises(Exception, match=r"TopLogprobs: table has the shape \[8\], expected \[9\]"):
        top_logprobs(np.zeros((1, 9), np.float32), 3, np.zeros(8, np.int64))
    with pytest.raises(Exception, match=r"TopLogprobs: logits has the shape .*, expected 2 dimensions"):
        top_logprobs(np.zeros((1, 1, 9), np.float32), 3)
    with pytest.raises(Exception, match="TopLogprobs: k is 0, expected more than 0"):
        top_logprobs(np.zeros((1, 9), np.float32), 0)
