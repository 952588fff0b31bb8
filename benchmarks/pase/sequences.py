"""PaSE's networks for sequences: an LSTM language model, and an encoder and decoder of attention."""

from __future__ import annotations

from pase.layers import Builder, Value
from pase.network import Network

CUTOFF = 1
LENGTH = 256


def rnnlm(batch: int) -> Network:
    """Two LSTM layers of 2048 units as one vertex, between an embedding and a classifier of 100 000 words."""
    net = Builder()
    x = net.embedding(Value((batch, LENGTH)), 100_000, 2048)
    x = net.linear(net.lstm(x, 2), 100_000)
    net.cross_entropy(x)
    return net.network("rnnlm", batch, CUTOFF)


def transformer(batch: int, *, large: bool = False) -> Network:
    """Six layers of encoder, six of decoder, 50 000 words; ``large`` doubles width, heads and inner width."""
    net = Builder()
    scale = 2 if large else 1
    size, heads, inner, words = 512 * scale, 8 * scale, 2048 * scale, 50_000

    def start() -> Value:
        positions = Value((batch, LENGTH, size))
        return net.elementwise(net.embedding(Value((batch, LENGTH)), words, size), positions)

    def attend(x: Value, memory: Value | None = None) -> Value:
        if memory is None:
            qkv = net.einsum("ble,shek->sbhlk", x, Value((3, heads, size, size // heads)))
        else:
            stacked = net.stack([x, memory, memory])
            qkv = net.einsum("sble,shek->sbhlk", stacked, Value((3, heads, size, size // heads)))
        q, k, v = net.unstack(qkv)
        weights = net.softmax(net.einsum("bhlk,bhmk->bhlm", q, k))
        read = net.einsum("bhlm,bhmk->bhlk", weights, v)
        return added(x, net.einsum("bhlk,hek->ble", read, Value((heads, size, size // heads))))

    def widen(x: Value) -> Value:
        y = net.einsum("ble,ef->blf", x, Value((size, inner)), pointwise=2)
        return added(x, net.einsum("blf,fe->ble", y, Value((inner, size))))

    def added(x: Value, y: Value) -> Value:
        return net.layer_norm(net.elementwise(x, y))

    encoded = start()
    for _ in range(6):
        encoded = widen(attend(encoded))
    x = start()
    for _ in range(6):
        x = widen(attend(attend(x), encoded))
    net.cross_entropy(net.einsum("ble,ev->blv", x, Value((size, words))))
    return net.network("transformer-large" if large else "transformer", batch, CUTOFF)
