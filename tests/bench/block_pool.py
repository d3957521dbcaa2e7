#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A KV block pool of the usual design in Python, as the peer of `kvbench mm`.

Blocks are objects with a reference count and a hash; free ones lie on a doubly linked list in
eviction order, cached ones are also in a dictionary by hash. get() takes blocks from the front,
and drops the hash of those that had one; free() puts them back at the end. Hashes are SHA-256
over (parent's hash, token ids), chained. Written for this benchmark.

Prints two lines, each: name p50 p99 mean samples (ns).
"""
import hashlib
import pickle
import time

NR_BLOCKS = 16384
BATCH = 100


class Block:
    __slots__ = ("number", "refs", "hash", "prev", "next")

    def __init__(self, number):
        self.number = number
        self.refs = 0
        self.hash = None
        self.prev = None
        self.next = None


class FreeList:
    def __init__(self, blocks):
        self.nr = len(blocks)
        self.head = Block(-1)
        self.tail = Block(-1)
        last = self.head
        for b in blocks:
            last.next, b.prev = b, last
            last = b
        last.next, self.tail.prev = self.tail, last

    def pop_many(self, nr):
        out = []
        at = self.head.next
        for _ in range(nr):
            out.append(at)
            after = at.next
            at.prev = at.next = None
            at = after
        self.head.next, at.prev = at, self.head
        self.nr -= nr
        return out

    def append_many(self, blocks):
        last = self.tail.prev
        for b in blocks:
            last.next, b.prev = b, last
            last = b
        last.next, self.tail.prev = self.tail, last
        self.nr += len(blocks)


class BlockPool:
    def __init__(self, nr):
        self.blocks = [Block(i) for i in range(nr)]
        self.free_list = FreeList(self.blocks)
        self.cached = {}

    def get(self, nr):
        if nr > self.free_list.nr:
            raise ValueError(f"{nr} blocks asked for, {self.free_list.nr} are free")
        out = self.free_list.pop_many(nr)
        for b in out:
            if b.hash is not None:
                self.cached.pop(b.hash, None)
                b.hash = None
            assert b.refs == 0
            b.refs = 1
        return out

    def free(self, blocks):
        for b in blocks:
            b.refs -= 1
        self.free_list.append_many([b for b in blocks if b.refs == 0])


def chain(tokens):
    parent, hashes = b"", []
    for i in range(0, len(tokens), 16):
        parent = hashlib.sha256(pickle.dumps((parent, tuple(tokens[i : i + 16])))).digest()
        hashes.append(parent)
    return hashes


def report(name, ns):
    ns.sort()
    print(name, ns[len(ns) // 2], ns[len(ns) * 99 // 100], sum(ns) / len(ns), len(ns))


def main():
    pool = BlockPool(NR_BLOCKS)
    ns = []
    for _ in range(5000):
        start = time.perf_counter_ns()
        blocks = pool.get(BATCH)
        pool.free(blocks[::-1])
        ns.append(time.perf_counter_ns() - start)
    report("block_pool", ns)
    tokens = [i * 2654435761 % 4294967296 for i in range(32768)]
    ns = []
    for _ in range(20):
        start = time.perf_counter_ns()
        chain(tokens)
        ns.append(time.perf_counter_ns() - start)
    report("sha256_chain", ns)


if __name__ == "__main__":
    main()
