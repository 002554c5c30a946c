"""What `up` does while its cluster serves: says so once, then shows how the workers are and kills silent ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvrelay.cli.cluster import Cluster
from kvrelay.cli.members import LocalPlan, reachable
from kvrelay.cli.screen import Screen
from kvrelay.cli.serve import Body
from kvrelay.errors import KVRelayError

if TYPE_CHECKING:
    from kvrelay.client import AsyncClient, Topology

REFRESH_S = 1.0


def keep_up(plan: LocalPlan, screen: Screen) -> Body:
    """A body that prints `ready HOST:PORT`, with the OpenAI door also its URL, and never returns by itself."""

    async def body(target: str, cluster: Cluster) -> int:
        print(f"ready {plan.target}" + (f" http://{reachable(plan.http)}" if plan.http else ""), flush=True)
        from kvrelay.cli.watchdog import watch

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(lambda: cluster.reached, cluster.kill_silent))
            if screen.live:
                tasks.create_task(_show(target, plan, cluster, screen))
        raise AssertionError("both run until they are cancelled")

    return body


async def _show(target: str, plan: LocalPlan, cluster: Cluster, screen: Screen) -> None:
    from kvrelay.client import AsyncClient

    async with AsyncClient(target) as client:
        while True:
            screen.status(await _line(client, plan, cluster))
            await asyncio.sleep(REFRESH_S)


async def _line(client: AsyncClient, plan: LocalPlan, cluster: Cluster) -> str:
    try:
        topology = await client.topology()
    except KVRelayError as error:
        return f"{plan.target}  {len(cluster.pids)} processes, no answer: {error.message}"
    return describe(plan.target, plan.num_workers, topology)


def describe(target: str, wanted: int, topology: Topology) -> str:
    """One line: how many workers, and of each what it runs and waits for, its rate and the blocks in use."""
    workers = "  ".join(
        f"{w['id']} {w['running']}+{w['waiting']} {w['tokens_per_s']:.0f} tok/s "
        f"{w['blocks']['total'] - w['blocks']['free']}/{w['blocks']['total']} blocks"
        for w in topology["workers"]
    )
    return f"{target}  {len(topology['workers'])}/{wanted} workers  {topology['open_requests']} requests  {workers}"
