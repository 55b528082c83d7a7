"""The configuration of a run as its critic sees it. No torch."""

from dapo_megatron.config.run import Config


def critic_config(config: Config) -> Config:
    """The run with the critic's own model and optimizer in the place of the policy's; all else is the same."""
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    return config.model_copy(update={"model": model, "optimizer": config.critic.optimizer})


def critic_keys(config: Config) -> dict[str, str]:
    """For `errors.renamed_keys`: keys of the policy, and those of the section `critic` that stand in their place."""
    path = {"model.path": "critic.path"} if config.critic.path is not None else {}
    return {"optimizer.": "critic.optimizer.", **path}
