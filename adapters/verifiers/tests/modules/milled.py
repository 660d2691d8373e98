"""A taskset with a harness of its own, which asks once and says so."""

# mypy: ignore-errors

import httpx
import verifiers.v1 as vf
from sums import SumData, SumTask
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Mill", "Milled"]


class Mill(vf.Harness[vf.HarnessConfig]):
    """One request to the model, in the process of verifiers."""

    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask."""
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages})
        return ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


class Milled(vf.Taskset[SumTask, vf.TasksetConfig]):
    """One sum."""

    def load(self):
        """Make it."""
        yield SumTask(SumData(prompt="2+3", answer="5", system_prompt="Add."), self.config.task)
