"""Serial or split flips where the arithmetic says.

An encode takes 2.5 ms; a copy 0.3 ms over NVLink, 2.1 ms over PCIe. One decoder with an encoder on its own device (e0)
and one elsewhere (e1):

    serial   2.5 ms x (images waiting there + 1) + 2.5 ms x running x weight
    split    2.5 ms x (images waiting there + 1) + copy
"""

from __future__ import annotations

import pytest

from scheduler.loads import Load, RequestShape
from scheduler.plan import Replica
from scheduler.routing import Router
from tests.unit.decisions.worlds import COSTS, image_shape, loads, plan

NVLINK, PCIE = "NV12", "PIX"


@pytest.mark.parametrize(
    ("link", "running", "waiting", "weight", "mode", "price_ms", "other_ms"),
    [
        (NVLINK, 0, 0, 1.0, "serial", 2.5, 2.8),
        (NVLINK, 1, 0, 1.0, "split", 2.8, 5.0),
        (NVLINK, 1, 1, 1.0, "serial", 5.0, 5.3),
        (NVLINK, 2, 1, 1.0, "split", 5.3, 7.5),
        (NVLINK, 1, 0, 0.1, "serial", 2.75, 2.8),
        (NVLINK, 1, 0, 0.2, "split", 2.8, 3.0),
        (NVLINK, 30, 8, 1.0, "split", 22.8, 77.5),
        (PCIE, 0, 0, 1.0, "serial", 2.5, 4.6),
        (PCIE, 1, 0, 1.0, "split", 4.6, 5.0),
        (PCIE, 1, 0, 0.8, "serial", 4.5, 4.6),
        (PCIE, 2, 1, 1.0, "split", 7.1, 7.5),
        (PCIE, 1, 1, 1.0, "serial", 5.0, 7.1),
    ],
)
def test_one_image(link, running, waiting, weight, mode, price_ms, other_ms) -> None:  # type: ignore[no-untyped-def]
    world = plan(["cuda:0", "cuda:1"], ["cuda:0"], link, stall_weight=weight)
    now = loads(world, e1=Load(pending_images=waiting), d0=Load(running=running))

    decision = Router(world, COSTS).decide(image_shape(), now)

    assert (decision.mode, decision.encoder) == (mode, "e0" if mode == "serial" else "e1")
    assert decision.stages[0].weight * 1000 == pytest.approx(price_ms)
    assert decision.alternative is not None
    assert decision.alternative.price_s * 1000 == pytest.approx(other_ms)


def test_without_another_device_it_is_serial_whatever_it_stalls() -> None:
    world = plan(["cuda:0"], ["cuda:0"])

    decision = Router(world, COSTS).decide(image_shape(), loads(world, d0=Load(running=39)))

    assert (decision.mode, decision.alternative) == ("serial", None)


def test_without_an_encoder_of_its_own_it_is_split() -> None:
    world = plan(["cuda:1"], ["cuda:0"], PCIE)

    decision = Router(world, COSTS).decide(image_shape(), loads(world))

    assert (decision.mode, decision.alternative) == ("split", None)


def test_when_the_other_encoder_dies_it_is_serial() -> None:
    world = plan(["cuda:0", "cuda:1"], ["cuda:0"], NVLINK)
    now = loads(world, e1=Load(is_available=False), d0=Load(running=30))

    assert Router(world, COSTS).decide(image_shape(), now).mode == "serial"


def test_without_peer_access_a_copy_takes_the_way_through_the_host() -> None:
    world = plan(["cuda:1"], ["cuda:0"], "PHB")  # 12 GB/s where the GPUs are not known, half of it staged
    staged = world.model_copy(
        update={"links": tuple(link.model_copy(update={"has_peer_access": False}) for link in world.links)}
    )

    direct_s, staged_s = (Router(each, COSTS).decide(image_shape(), loads(each)).transfer_s for each in (world, staged))

    assert direct_s == pytest.approx(4_718_592 / 12e9)
    assert staged_s == pytest.approx(2 * direct_s)


@pytest.mark.parametrize(
    ("encoder_cpus", "decoder_cpus", "mode"),
    [((), (), "serial"), ((0,), (), "serial"), ((0, 1), (1, 2), "serial"), ((0,), (1,), "split")],
)
def test_on_cpus_sets_that_overlap_are_one_device(encoder_cpus, decoder_cpus, mode) -> None:  # type: ignore[no-untyped-def]
    world = plan(["cpu"], ["cpu"]).model_copy(
        update={
            "encoders": (Replica(name="e0", device="cpu", cpus=encoder_cpus, place="set:0"),),
            "decoders": (Replica(name="d0", device="cpu", cpus=decoder_cpus, place="set:1"),),
        }
    )

    assert Router(world, COSTS).decide(image_shape(), loads(world)).mode == mode


def test_four_images_spread_over_two_encoders_in_order() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], NVLINK)

    decision = Router(world, COSTS).decide(image_shape(4), loads(world))

    assert decision.encoders == ("e0", "e1", "e0", "e1")
    assert decision.reason_kind == "fan_out"
    assert decision.encode_s == pytest.approx(2 * 0.0025)
    assert decision.transfer_s == pytest.approx(2 * 0.3e-3)
    assert [stage.weight for stage in decision.stages[:2]] == pytest.approx([0.0056, 0.0056])


def test_images_go_round_an_encoder_that_is_busy() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], NVLINK)

    decision = Router(world, COSTS).decide(image_shape(4), loads(world, e0=Load(pending_images=2)))

    assert decision.encoders == ("e1", "e1", "e0", "e1")  # 2.8, 5.6, 7.8 against 8.4, 8.4 against 10.6 ms


def test_text_skips_the_encoders() -> None:
    world = plan(["cuda:1"], ["cuda:0", "cuda:2"])
    now = loads(world, e0=Load(is_available=False), d0=Load(pending_tokens=5000, running=5))

    decision = Router(world, COSTS).decide(RequestShape(0, 64, 128), now)

    assert (decision.encoder, decision.encoders, decision.mode, decision.decoder) == (None, (), "text", "d1")
    assert (decision.encode_s, decision.transfer_s) == (0.0, 0.0)


def test_an_image_goes_where_it_is_cached() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], NVLINK)
    now = loads(world, e1=Load(cached={b"cat"}, pending_images=1))

    decision = Router(world, COSTS).decide(image_shape(2, image_keys=(b"dog", b"cat")), now)

    assert decision.encoders == ("e0", "e1")  # the cat: 2.5 + 0.3 ms of waiting and copy, without an encode
    assert decision.reason_kind == "cached"


def test_one_image_twice_is_encoded_once() -> None:
    world = plan(["cuda:1", "cuda:2"], ["cuda:0"], NVLINK)

    decision = Router(world, COSTS).decide(image_shape(2, image_keys=(b"cat", b"cat")), loads(world))

    assert decision.encoders == ("e0", "e0") or decision.encode_s == pytest.approx(0.0025)


@pytest.mark.parametrize("kept", [Load(cached={b"cat"}), Load(prefixes={b"system"})], ids=["image", "prefix"])
def test_a_decoder_that_has_the_beginning_needs_less_prefill(kept: Load) -> None:
    world = plan(["cuda:2"], ["cuda:0", "cuda:1"], NVLINK)
    shape = image_shape(image_keys=(b"cat",), prefix_key=b"system", prefix_tokens=576)

    decision = Router(world, COSTS).decide(shape, loads(world, d1=kept))

    assert decision.decoder == "d1"
    assert decision.prefill_s == pytest.approx(0.001 + 64 * 70e-6)


def test_the_mode_is_kept_while_little_is_to_gain() -> None:
    world = plan(["cuda:0", "cuda:1"], ["cuda:0"], NVLINK, hysteresis=0.15)
    router = Router(world, COSTS)
    modes = []
    for running, waiting in ((0, 0), (1, 0), (0, 0), (1, 1), (3, 1), (0, 0)):
        now = loads(world, e1=Load(pending_images=waiting), d0=Load(running=running))
        decision = router.decide(image_shape(), now)
        modes.append((decision.mode, decision.reason_kind))

    assert modes == [
        ("serial", "finish"),
        ("split", "finish"),  # 2.8 against 5.0
        ("split", "sticky"),  # 2.8 against 2.5: 12 % more
        ("split", "sticky"),  # 5.3 against 5.0: 6 % more
        ("split", "finish"),  # 5.3 against 10.0
        ("split", "sticky"),
    ]


def test_a_slow_encode_with_its_copy_makes_a_warning() -> None:
    world = plan(["cuda:1"], ["cuda:0"], PCIE)
    decision = Router(world, COSTS).decide(image_shape(), loads(world, e0=Load(pending_images=50)))

    assert decision.warning(150.0) is None
    assert decision.warning(100.0) == (
        "encode and transfer (e0 to d0) are predicted to take 129.6 ms, more than 100 ms; split, predicted 127.5 ms + "
        "2.1 ms"
    )
    assert decision.warning(100.0, observed_s=0.2) == (
        "encode and transfer (e0 to d0) took 200.0 ms, more than 100 ms; split, predicted 127.5 ms + 2.1 ms"
    )
    assert decision.warning(300.0, observed_s=0.2) is None


def test_a_decision_is_told_in_plain_values_with_a_reason() -> None:
    world = plan(["cuda:0", "cuda:1"], ["cuda:0"], NVLINK)
    told = Router(world, COSTS).decide(image_shape(), loads(world, d0=Load(running=8, pending_tokens=6000))).to_dict()

    assert told["reason"] == (
        "split: encode on e1 2.5 ms + transfer 300 us, against 22.5 ms for serial on cuda:0; d0 with 8 running, "
        "finish in 1.11 s"
    )
    assert (told["encoder"], told["encoders"], told["decoder"], told["mode"]) == ("e1", ["e1"], "d0", "split")
    assert told["stages"] == [
        {"stage": "encode", "replica": "e1", "device": "cuda:1", "weight": 0.0028},
        {"stage": "decode", "replica": "d0", "device": "cuda:0", "weight": 1.1077},
    ]
    assert told["predicted"] == {
        "encode_s": 0.0025,
        "transfer_s": 0.0003,
        "stall_s": 0.0,
        "wait_s": 0.0,
        "prefill_s": 0.0458,
        "step_s": 0.00827419,
        "finish_s": 1.1077,
    }


@pytest.mark.parametrize(("policy", "mode"), [("serial", "serial"), ("split", "split")])
@pytest.mark.parametrize("pending", [0, 20])
def test_a_mode_can_be_demanded(policy: str, mode: str, pending: int) -> None:
    world = plan(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"], policy=policy)

    decision = Router(world, COSTS).decide(image_shape(2), loads(world, e0=Load(pending_images=pending)))

    assert decision.mode == mode
    # Away from the images that wait: to encode beside no others.
    assert decision.decoder == ("d1" if pending and mode == "serial" else "d0")
    own = decision.decoder.replace("d", "e")
    assert decision.encoders == ((own, own) if mode == "serial" else tuple({"e0", "e1"} - {own}) * 2)


@pytest.mark.parametrize(("policy", "encoders"), [("serial", ["cuda:1"]), ("split", ["cuda:0"])])
def test_a_mode_that_no_decoder_can_have_is_refused(policy: str, encoders: list[str]) -> None:
    with pytest.raises(ValueError, match=f"policy '{policy}': no decoder of the plan can"):
        Router(plan(encoders, ["cuda:0"], policy=policy), COSTS)
