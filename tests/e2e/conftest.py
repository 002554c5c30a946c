"""One quiet cluster of the hash model, shared by all end-to-end tests that leave a cluster as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster, running_cluster


@pytest.fixture(scope="session")
def hash_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """1 prefill, 1 decode, blocks inside the link; pools of 64 blocks of 16 tokens: the context limit is 1,024."""
    log = tmp_path_factory.mktemp("hash") / "log"
    with running_cluster(log, "--executor", "hash", "--transport", "grpc", "--num-blocks", "64") as cluster:
        yield cluster
