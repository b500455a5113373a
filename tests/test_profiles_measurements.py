import gzip
import json

import pytest

from profiles import (
    Acceptance,
    HoldoutTree,
    LatencyPoint,
    MeasuredTree,
    Measurements,
    RoundPoint,
    Score,
    SpectuneError,
    TreeConfig,
    load_measurements,
    measurements_path,
    save_measurements,
    validated,
)

TREE = TreeConfig(depth=2, width=2, top_k=2, nodes=4)
TOY = Measurements(
    latency=(
        LatencyPoint(part="verify", x=5, context=128, relative=1.23456789, ms=20.1, n=30),
        LatencyPoint(part="reference", x=1, context=128, relative=1.0, ms=16.3, n=300),
    ),
    rounds=(
        RoundPoint(draft="toy", tree=TREE, nodes=3.5, relative=1.4, predicted=1.5, left_out=True),
    ),
    scores=(Score(draft="toy", tree=TREE, tau=1.8, predicted_speedup=1.3),),
    measured=(MeasuredTree(draft="toy", tree=TREE, prompt_ratios=(1.2, 0.9)),),
    holdout=(
        HoldoutTree(draft="toy", tree=TREE, plain_ms=(30.0, 20.0), speculative_ms=(20.0, 25.0)),
    ),
    acceptance=(Acceptance(draft="toy", tried=(10, 6), accepted=((5, 2), (3, 0))),),
)


def packed(folder, data):
    path = folder / "toy.measurements.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def test_measurements_return_as_they_were_written(tmp_path):
    path = measurements_path(tmp_path / "toy.v2.yaml")
    assert path == tmp_path / "toy.v2.measurements.json.gz"
    save_measurements(TOY, path)
    assert load_measurements(path) == TOY
    assert TOY.latency[0].relative == 1.23457


def test_equal_measurements_give_equal_bytes(tmp_path):
    save_measurements(TOY, tmp_path / "a")
    save_measurements(TOY.model_copy(), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency": [{"part": "verify"}]}, r"has 5 faults:\n  \$\.latency\[0\]\.x is missing"),
        ({"scores": {}}, r"\$\.scores is {}: it must be a list; write it as \[value"),
        ({"notes": "text"}, r"\$\.notes is not a known key"),
        ({"schema_version": 2}, r"\$\.schema_version is 2, .* upgrade spectune\.$"),
        ({"latency": [float("nan")]}, r"\$\.latency\[0\] is nan: it must be a mapping"),
    ],
)
def test_faults_name_the_file_the_key_and_the_remedy(tmp_path, change, message):
    data = TOY.model_dump(mode="json") | change
    path = packed(tmp_path, data)
    with pytest.raises(SpectuneError, match=message) as caught:
        load_measurements(path)
    assert str(caught.value).startswith(str(path))


def test_acceptance_cannot_exceed_what_was_tried():
    with pytest.raises(SpectuneError, match=r"\$\.tried is 4: row 0 of accepted adds up to 5"):
        validated(Acceptance, {"draft": "toy", "tried": [4], "accepted": [[3, 2]]}, "toy")
    with pytest.raises(
        SpectuneError, match=r"\$\.accepted is null: it has 0 rows but tried has 1"
    ):
        validated(Acceptance, {"draft": "toy", "tried": [4], "accepted": []}, "toy")


def test_holdout_times_are_paired():
    assert TOY.holdout[0].prompt_ratios == [1.5, 0.8]
    data = TOY.holdout[0].model_dump(mode="json") | {"speculative_ms": [1.0]}
    with pytest.raises(SpectuneError, match=r"has 1 entries but plain_ms has 2; give one for"):
        validated(HoldoutTree, data, "toy")


@pytest.mark.parametrize("keep", [0, 5, 20, -8, -1])
def test_a_cut_file_is_refused(tmp_path, keep):
    path = packed(tmp_path, TOY.model_dump(mode="json"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SpectuneError, match=r"is not (a whole gzip file|JSON)"):
        load_measurements(path)


def test_a_damaged_or_wrong_file_is_refused(tmp_path):
    path = packed(tmp_path, TOY.model_dump(mode="json"))
    damaged = bytearray(path.read_bytes())
    damaged[30:40] = b"\xff" * 10
    path.write_bytes(bytes(damaged))
    with pytest.raises(SpectuneError, match="is not a whole gzip file"):
        load_measurements(path)
    with pytest.raises(SpectuneError, match="must be a JSON object"):
        load_measurements(packed(tmp_path, [1, 2]))
    path.write_bytes(gzip.compress(b"[" * 100_000))
    with pytest.raises(SpectuneError, match="is not JSON"):
        load_measurements(path)
    path.write_bytes(gzip.compress(b"1" * 101 * 1024 * 1024, compresslevel=1))
    with pytest.raises(SpectuneError, match="unpacks to more than 100 MiB"):
        load_measurements(path)
    with pytest.raises(SpectuneError, match="is a folder"):
        load_measurements(tmp_path)
