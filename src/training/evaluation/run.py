"""All evaluations that a configuration asks for, on all ranks, from the data to the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from shardclip.training.data.config import DataConfig
from shardclip.training.data.finite import FinitePass, FolderSource, Labelled, labelled_images, pairs
from shardclip.training.data.image_input import ImageInput, normalise
from shardclip.training.data.samples import Captions
from shardclip.training.distributed import Processes
from shardclip.training.evaluation import names
from shardclip.training.evaluation.config import TASKS, EvaluationConfig, Task
from shardclip.training.evaluation.examples import draw_examples
from shardclip.training.evaluation.names import Names
from shardclip.training.evaluation.pairs import evaluate_pairs
from shardclip.training.evaluation.results import Result
from shardclip.training.evaluation.zero_shot import classifier, zero_shot


def evaluate(
    model: nn.Module,
    config: EvaluationConfig,
    data_config: DataConfig,
    image_input: ImageInput,
    tokenize: Callable[[list[str]], Tensor],
    *,
    processes: Processes,
    tasks: Collection[Task] = TASKS,
    model_name: str = "",
    pretrained: str = "",
) -> list[Result]:
    """Everything that `config` names data for; the model and the random generators are as before afterwards.

    Args:
        model: a `DualEncoder`, plain or wrapped by DDP or FSDP; every rank calls this.
        config: what is evaluated.
        data_config: the validation pairs, and how data is read.
        image_input: what the image tower wants.
        tokenize: texts to token ids [T, L].
        processes: the ranks.
        tasks: leave out what is not due.
        model_name: the architecture, for the results.
        pretrained: where the weights came from, for the results.

    Returns:
        One result per data set, the same on every rank but for the picture, which rank 0 has.

    Raises:
        UserError: data or names that cannot be used; the same on every rank.
    """
    sources = _Sources(config, data_config, image_input, tokenize, processes)
    job = _Job(model, sources, model_name, pretrained)
    results: list[Result] = []
    if "zeroshot_classification" in tasks:
        results += job.classification()
    if "zeroshot_retrieval" in tasks and sources.has_pairs:
        results.append(job.retrieval())
    return results


def check_data(
    config: EvaluationConfig,
    data_config: DataConfig,
    image_input: ImageInput,
    tokenize: Callable[[list[str]], Tensor],
    processes: Processes,
) -> None:
    """Open all that a run will evaluate on, so that it does not learn of a wrong path after an epoch.

    Raises:
        UserError: data or names that cannot be used; the same on every rank.
    """
    sources = _Sources(config, data_config, image_input, tokenize, processes)
    if config.zeroshot_frequency or config.eval_every:
        for _ in sources.labelled_sets():
            pass
    if sources.has_pairs and (config.val_frequency or config.eval_every):
        sources.pairs()


@dataclass(frozen=True)
class _Labelled:
    """A labelled data set at hand: this rank's share of its pictures, and its words."""

    dataset: str
    images: FinitePass
    names: Names


@dataclass(frozen=True)
class _Sources:
    """The data of an evaluation, and how it is read."""

    config: EvaluationConfig
    data_config: DataConfig
    image_input: ImageInput
    tokenize: Callable[[list[str]], Tensor]
    processes: Processes

    @property
    def has_pairs(self) -> bool:
        """Whether there are pairs to retrieve."""
        return bool(self.data_config.val_data) or self.data_config.dataset_type == "synthetic"

    def pairs(self) -> FinitePass:
        """This rank's validation pairs."""
        with self.processes.together("opening the validation data"):
            return pairs(
                self.data_config,
                self.image_input,
                self.tokenize,
                batch_size=self.config.val_batch_size,
                rank=self.processes.rank,
                world_size=self.processes.world_size,
            )

    def labelled_sets(self) -> Iterator[_Labelled]:
        """Each labelled data set that is named."""
        config = self.config
        for dataset, path in (
            ("imagenet1k", config.imagenet_val),
            ("imagenetv2", config.imagenet_v2),
            (None, config.zeroshot_data),
        ):
            if path is None:
                continue
            with self.processes.together(f"opening {path}"):
                images = labelled_images(
                    replace(
                        self.data_config, val_data=split_of(path), val_num_samples=None, dataset_type="auto"
                    ),
                    self.image_input,
                    batch_size=config.val_batch_size,
                    rank=self.processes.rank,
                    world_size=self.processes.world_size,
                )
                if dataset is not None:
                    words = names.imagenet()
                else:
                    files = config.zeroshot_classnames, config.zeroshot_templates
                    words = names.find(path, *files, _folders(images))
                labelled = _Labelled(dataset or _label(path), images, words)
            yield labelled


@dataclass(frozen=True)
class _Job:
    """A model to evaluate."""

    model: nn.Module
    sources: _Sources
    model_name: str
    pretrained: str

    def classification(self) -> Iterator[Result]:
        """Each labelled data set; those with the same words share the class vectors."""
        weights: dict[Names, Tensor] = {}
        config, processes = self.sources.config, self.sources.processes
        for labelled in self.sources.labelled_sets():
            words = labelled.names
            if words not in weights:
                weights[words] = classifier(
                    self.model,
                    self.sources.tokenize,
                    words.classnames,
                    words.templates,
                    processes=processes,
                    batch_size=4 * config.val_batch_size,
                )
            metrics = zero_shot(
                self.model,
                weights[words],
                _numbered(labelled.images),
                normalise=self._pixels,
                processes=processes,
            )
            yield Result(
                dataset=labelled.dataset,
                model=self.model_name,
                pretrained=self.pretrained,
                task="zeroshot_classification",
                samples=int(metrics.pop("samples")),
                metrics=metrics,
                classes=len(words.classnames),
                templates=len(words.templates),
                names_digest=words.digest,
            )

    def retrieval(self) -> Result:
        """The validation pairs."""
        sources = self.sources
        batches = sources.pairs()
        metrics, encoded = evaluate_pairs(
            self.model,
            batches,
            normalise=self._pixels,
            processes=sources.processes,
            chunk_size=sources.config.val_retrieval_chunk_size,
        )
        picture = None
        if sources.config.val_examples:
            picture = draw_examples(
                encoded,
                batches,
                Captions(sources.data_config),
                metrics,
                count=sources.config.val_examples,
                processes=sources.processes,
            )
        return Result(
            dataset=_label(sources.data_config.val_data or "synthetic"),
            model=self.model_name,
            pretrained=self.pretrained,
            task="zeroshot_retrieval",
            samples=int(metrics.pop("samples")),
            metrics=metrics,
            picture=picture,
        )

    def _pixels(self, images: Tensor) -> Tensor:
        return normalise(images, self.sources.image_input)


def split_of(path: str) -> str:
    """Where the samples of a data set lie: CLIP_benchmark's test split, the one folder of ImageNet-v2."""
    for inside in ("test", "ImageNetV2-matched-frequency", "imagenetv2-matched-frequency-format-val"):
        folder = os.path.join(path, inside)
        is_split = inside != "test" or os.path.isfile(os.path.join(path, names.CLASSNAMES_FILE))
        if is_split and os.path.isdir(folder):
            return folder
    return path


def _folders(images: FinitePass) -> list[str]:
    """The class folders of a data set that is a folder of folders, in the order of their names."""
    source = images.reader.source
    return list(source.classes) if isinstance(source, FolderSource) else []


def _numbered(images: FinitePass) -> Iterable[Labelled]:
    """The pictures with their class numbers: folders that are called by numbers mean those.

    (ImageNet-v2's are "0" to "999", and by name "10" sorts before "2".)
    """
    folders = _folders(images)
    if not folders or not all(folder.isdecimal() for folder in folders):
        return images
    number = torch.tensor([int(folder) for folder in folders])
    return ((pictures, number[labels]) for pictures, labels in images)


def _label(data: str) -> str:
    """A data set's name from the place where it lies: the last part that is no shard and no split."""
    parts = [part for part in Path(data.split("::")[0]).parts if not part.endswith((".tar", ".txt", ".lst"))]
    while len(parts) > 1 and parts[-1] in ("test", "val", "validation", "train"):
        parts.pop()
    return Path(parts[-1]).stem if parts else Path(data).stem
