from __future__ import annotations

import os

import pytest

from raybench.worker.rendezvous import StoreHost, choose_interface


def test_gloo_gets_the_interface_of_the_nodes_address(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_interface_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::7"])
def test_an_address_of_no_interface_leaves_the_choice_to_gloo(monkeypatch, address):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == ""


def test_the_store_answers_at_its_address():
    from torch.distributed import TCPStore

    address, port = StoreHost("127.0.0.1").endpoint()
    assert address == "127.0.0.1"
    host = StoreHost(address)
    TCPStore(*host.endpoint(), is_master=False).set("key", "value")
    assert port != host.endpoint()[1]
