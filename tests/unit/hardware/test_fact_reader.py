"""The state and the errors of a device, as NVML and the kernel's log tell them."""

import re
from dataclasses import fields as fields_of
from pathlib import Path
from types import SimpleNamespace

import pynvml

from raybench.hardware.devices import FactReader, kernel_xids
from raybench.records.devices import DeviceFacts, NvLink
from tests.unit.fake_nvml import UUID, FakeNvml, XidEvents, fabric, fields, refusal
from tests.unit.fakes import make_device

GIB = 2**30
NO_LOG = Path("/no/such/log")
LOG = """\
6,1,100,-;usb 1-1: new device
4,2,200,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python, Ch 00000008, intr 00000000
4,3,300,-;NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', GPU has fallen off the bus.
4,4,400,-;NVRM: Xid (PCI:0000:1b:00): 48, pid=7, name=python, DBE (double bit error)
4,5,500,-;NVRM: GPU at PCI:0000:1b:00: Xid is no error here
"""


def link_errors(handle, link, counter):
    return {0: 5, 1: 1, 2: 700}[counter] if link == 1 else 0


ALL = {
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:1B:00.0"),
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda _, version: SimpleNamespace(
        total=141 * GIB, reserved=GIB, free=139 * GIB, used=GIB
    ),
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (3, 1, 1, 0),
    "nvmlDeviceGetRetiredPages": lambda _, cause: [0xA, 0xB] if cause == 1 else [0xC],
    "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    "nvmlDeviceGetPcieReplayCounter": 12,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetNvLinkState": lambda _, link: (1, 1, 0)[link] if link < 3 else refusal(),
    "nvmlDeviceGetNvLinkErrorCounter": link_errors,
    "nvmlDeviceGetGpuFabricInfoV": fabric(3, health_mask=0b01),
}


def read(log: Path = NO_LOG) -> DeviceFacts:
    (facts,) = FactReader(log).read([make_device(uuid=UUID)])
    return facts


def test_a_gpu_is_read_with_all_that_nvml_knows(monkeypatch):
    FakeNvml(**ALL, **XidEvents().answers).install(monkeypatch)
    facts = read()
    assert (facts.unread, facts.compute_capability) == ("", "9.0")
    assert (facts.memory_total_bytes, facts.memory_free_bytes) == (140 * GIB, 139 * GIB)
    assert (facts.remapped_rows, facts.is_remap_pending, facts.is_remap_failed) == (4, True, False)
    assert (facts.retired_pages, facts.is_retirement_pending, facts.ecc_errors) == (3, False, 0)
    assert (facts.pcie_replays, facts.pcie_lanes, facts.pcie_lanes_max) == (12, 8, 16)
    none = {"crc": 0, "replay": 0, "recovery": 0}
    assert facts.nvlinks == (
        NvLink(link=0, is_active=True, errors=none),
        NvLink(link=1, is_active=True, errors={"crc": 700, "replay": 5, "recovery": 1}),
        NvLink(link=2, is_active=False, errors=none),
    )
    assert (facts.fabric_state, facts.fabric_faults) == ("completed", ("degraded bandwidth",))
    assert (facts.kernel_xids, facts.new_xids) == (None, ())


def test_each_unsupported_question_costs_only_its_own_answer(monkeypatch):
    answers = {**ALL, **XidEvents().answers}
    with monkeypatch.context() as patched:
        FakeNvml(**answers).install(patched)
        whole = read()
    for name in answers:
        left = {key: value for key, value in answers.items() if key != name}
        with monkeypatch.context() as patched:
            FakeNvml(**left).install(patched)
            partly = read()
        differing = [
            field.name
            for field in fields_of(DeviceFacts)
            if getattr(partly, field.name) != getattr(whole, field.name)
            and field.name not in ("read_at", "xids_watched_since")
        ]
        assert len(differing) <= 4, (name, differing)


def test_a_gpu_that_nvml_does_not_know_is_unread_and_a_cpu_has_nothing_to_read(monkeypatch):
    FakeNvml(**ALL).install(monkeypatch)
    reader = FactReader(NO_LOG)
    other, cpu = reader.read([make_device(uuid="GPU-0"), make_device(kind="cpu", uuid="a/1")])
    assert other.unread == "NVML does not answer"
    assert (cpu.unread, cpu.new_xids) == ("", None)


def test_errors_of_links_that_newer_drivers_count_by_field_are_read_there(monkeypatch):
    counted = fields(NVLINK_ERROR_DL_REPLAY=4, NVLINK_ERROR_DL_RECOVERY=0)
    answers = {
        **ALL,
        "nvmlDeviceGetNvLinkErrorCounter": lambda *_: refusal(),
        "nvmlDeviceGetFieldValues": counted,
    }
    FakeNvml(**answers).install(monkeypatch)
    assert {tuple(link.errors.items()) for link in read().nvlinks or ()} == {
        (("replay", 4), ("recovery", 0))
    }


def test_a_fabric_that_could_not_be_joined_is_a_fault(monkeypatch):
    failed = fabric(3, status=pynvml.NVML_ERROR_UNKNOWN)
    FakeNvml(**{**ALL, "nvmlDeviceGetGpuFabricInfoV": failed}).install(monkeypatch)
    assert read().fabric_faults == ("error 999 of the fabric manager",)


def test_errors_of_the_driver_are_told_from_the_first_reading_on(monkeypatch):
    events = XidEvents()
    fake = FakeNvml(**ALL, **events.answers).install(monkeypatch)
    reader, devices = FactReader(NO_LOG), [make_device(uuid=UUID)]
    (before,) = reader.read(devices)
    events.numbers += [31, 79]
    (after,) = reader.read(devices)
    (later,) = reader.read(devices)
    assert [before.new_xids, after.new_xids, later.new_xids] == [(), (31, 79), (31, 79)]
    assert before.xids_watched_since == after.xids_watched_since == before.read_at
    assert fake.asked.count("nvmlDeviceRegisterEvents") == 1


def test_the_kernels_log_is_read_for_the_errors_of_each_device(monkeypatch, tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    assert kernel_xids(log) == {(0, 0x1B, 0): [31, 48], (0, 0x9D, 0): [79]}
    FakeNvml(**ALL).install(monkeypatch)
    assert read(log).kernel_xids == (31, 48)
    log.write_text(re.sub("Xid.*", "", LOG))
    assert read(log).kernel_xids == ()
    # Unknown, and not empty.
    assert kernel_xids(NO_LOG) is None
    assert kernel_xids(tmp_path) is None
