"""How an operator computes its part on one device: by its own kernel on parts, where need be with changed arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.plan.execute import attention, chance, loss, norm, product, rearrange
from weft.plan.execute.site import Local, Operand, Site, Unfit, operands

Rule = Callable[[Site], Local]

_RULES: dict[str, Rule] = {
    **rearrange.RULES,
    **product.RULES,
    **loss.RULES,
    **norm.RULES,
    **chance.RULES,
    **attention.RULES,
}

# Their results over parts add up to the result over all, as they are or as the rules above make them.
_ADDS_UP = frozenset({"sum", "histc", *product.RULES, *loss.RULES, *norm.SYNCHRONISED})


def local(site: Site) -> Local:
    """How the operator computes its part. Raises Unfit with the reason where it cannot."""
    _refuse_mutation(site)
    if not site.is_cut:
        return (rearrange.RESTRIDED.get(site.name) or chance.RULES.get(site.name, Site.local))(site)
    _refuse_torn_operands(site)
    sums = [output for output in sorted(site.used) if site.summed(output)]
    rule = _RULES.get(site.name) or (loss.mean if site.has("reduction") else None)
    if sums and site.name not in _ADDS_UP and rule is not loss.mean:
        dims = sorted({site.operator.dims[site.split[axis]].name for axis in site.summed(sums[0])})
        raise Unfit(f"the results of parts of '{', '.join(dims)}' do not add up to the whole")
    if rule is None and chance.draws(site):
        raise Unfit("it draws at random, and its draw cannot be cut")
    return rule(site) if rule is not None else site.local()


def _refuse_mutation(site: Site) -> None:
    if isinstance(site.target, torch._ops.OpOverload) and site.target._schema.is_mutable:
        raise Unfit("it changes its operands in place, and parts of them are copies")


def _refuse_torn_operands(site: Site) -> None:
    """A split cuts an operand along one axis for each dimension; a tensor that has it twice cannot be cut so."""
    for tensor in (*(found.tensor for found in operands([site.args, site.kwargs])), *site.operator.outputs):
        for place in set(site.split):
            if place >= 0 and tensor.dims.count(place) > 1 and site.parts(place) > 1:
                raise Unfit(f"'{site.operator.dims[place].name}' cuts two axes of one tensor")


__all__ = ["Local", "Operand", "Rule", "Unfit", "local"]
