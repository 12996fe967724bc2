"""The configuration: one frozen dataclass a section, the help, range and choices beside each field.

`opt` is `dataclasses.field` with what the loader checks: `low`/`high` are inclusive bounds (of each element of a list),
`above` an exclusive lower bound, `choices` the allowed values. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def opt(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """A documented, range-checked config field."""
    metadata = {"help": help, "low": low, "high": high, "above": above, "choices": choices}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ImageAugmentConfig:
    """What happens to each camera image; sizes are for a 1600-pixel-wide source and scale with narrower ones."""

    resize: tuple[float, float] = opt((0.38, 0.55), "range of the random resize factor in training", above=0)
    resize_eval: float = opt(0.48, "resize factor in evaluation", above=0)
    shared: bool = opt(False, "one random resize, crop, flip and rotation for all images of a sample, of both frames")
    pad: bool = opt(
        False,
        "an image lower or narrower than the network's lies at its top left, the rest is padding, which petrv2 "
        "does not look at; false: it lies at the bottom, on black",
    )
    rotate: tuple[float, float] = opt((-5.4, 5.4), "range of the random rotation, degrees")
    flip: bool = opt(True, "flip each image with probability one half")
    draft: bool = opt(
        True,
        "training decodes JPEGs at a half, a quarter or an eighth where resizing goes below it anyway; faster",
    )
    grid_mask: float = opt(
        0.0, "probability that training cuts a grid of square holes into a sample's images", low=0, high=1
    )
    grid_mask_ratio: float = opt(0.5, "width of the stripes between those holes over their period", above=0, high=1)


@dataclass(frozen=True)
class SpaceAugmentConfig:
    """What happens to the LiDAR frame in training: rotate, translate, scale, then flips."""

    rotate: tuple[float, float] = opt((-0.785398, 0.785398), "range of the rotation about z, rad")
    translate: float = opt(0.5, "standard deviation of the translation per axis, m", low=0)
    scale: tuple[float, float] = opt((0.9, 1.1), "range of the scale", above=0)
    flip: bool = opt(True, "flip x and y, each with probability one half")


@dataclass(frozen=True)
class PasteCountsConfig:
    """Objects of each class that a sample is filled up to; 0 pastes none."""

    car: int = opt(2, "cars", low=0)
    truck: int = opt(3, "trucks", low=0)
    construction_vehicle: int = opt(7, "construction vehicles", low=0)
    bus: int = opt(4, "buses", low=0)
    trailer: int = opt(6, "trailers", low=0)
    barrier: int = opt(2, "barriers", low=0)
    motorcycle: int = opt(6, "motorcycles", low=0)
    bicycle: int = opt(6, "bicycles", low=0)
    pedestrian: int = opt(2, "pedestrians", low=0)
    traffic_cone: int = opt(2, "traffic cones", low=0)


@dataclass(frozen=True)
class PasteConfig:
    """Ground-truth pasting: objects of other samples put into the point cloud, for LiDAR-only training."""

    database: str = opt(
        "nuscenes_gt_database_train.npz", "objects and their points, from `bevctl data prepare --gt-database`"
    )
    counts: PasteCountsConfig = opt(PasteCountsConfig, "objects a sample is filled up to")
    min_points: int = opt(5, "objects with fewer LiDAR points are not pasted", low=0)
    stop_epoch: int = opt(15, "epoch, counted from 0, from which on nothing is pasted", low=0)


VEHICLE = "vehicle"
"""The map class that is drawn from the boxes of a sample instead of its map."""


@dataclass(frozen=True)
class PreviousFrameConfig:
    """The images of an earlier moment that a sample has beside its own."""

    source: str = opt(
        "sweeps",
        "camera sweeps, at some 12 Hz, or keyframes, which are two a second; an info file without camera sweeps "
        "gives keyframes",
        choices=("sweeps", "keyframes"),
    )
    train: tuple[int, int] = opt(
        (3, 26), "training draws between these places, both included, counted back in time from 0", low=0
    )
    eval: int = opt(14, "place in evaluation, counted back in time from 0", low=0)
    choice: str = opt(
        "auto",
        "random in training and fixed in evaluation (auto), or the same in both; PETRv2's map segmentation was "
        "measured with random ones",
        choices=("auto", "fixed", "random"),
    )


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and how they are read."""

    root: str = opt("data/nuscenes", "folder of the data set; other data paths are relative to it")
    info_train: str = opt("nuscenes_infos_train.pkl", "info file of the training samples")
    info_val: str = opt("nuscenes_infos_val.pkl", "info file of the evaluation samples")
    sweeps: int = opt(9, "LiDAR sweeps added to the keyframe", low=0, high=20)
    sweep_choice: str = opt(
        "auto",
        "which of the stored sweeps: random in training and nearest in evaluation (auto), or the same in both; "
        "published BEVFusion figures were measured with random ones",
        choices=("auto", "nearest", "random"),
    )
    sweep_pose: str = opt(
        "exact",
        "how sweeps are moved to the keyframe: exact, or with the translation along the sweep's axes, as mmdet3d 1.1 "
        "and newer does; the two differ where the car turns",
        choices=("exact", "mmdet3d"),
    )
    previous: PreviousFrameConfig | None = opt(
        None, "the images of an earlier moment beside those of the keyframe, or null; for petrv2"
    )
    classes: tuple[str, ...] = opt(
        (
            "car",
            "truck",
            "construction_vehicle",
            "bus",
            "trailer",
            "barrier",
            "motorcycle",
            "bicycle",
            "pedestrian",
            "traffic_cone",
        ),
        "object classes, in the order of the network's outputs",
    )
    map_classes: tuple[str, ...] = opt(
        ("drivable_area", "ped_crossing", "walkway", "stop_line", "carpark_area", "divider"),
        "map classes, in the order of the network's outputs; vehicle is drawn from the boxes, not from the map",
    )
    vehicle_origin: str = opt(
        "lidar",
        "what lies in the middle of the vehicle mask; ego, a metre behind the LiDAR, is where PETR's weights have it",
        choices=("lidar", "ego"),
    )
    box_convention: str = opt(
        "auto",
        "how info files store boxes: l, w, h, yaw or w, l, h, -yaw - pi/2; auto tells it from the objects' shapes",
        choices=("auto", "lwh", "wlh"),
    )
    max_bad_samples: int = opt(20, "unreadable samples an epoch may skip before the run fails", low=0)
    skip_samples: tuple[str, ...] = opt(
        (), "tokens of samples not to train on; the sample after it takes each one's place"
    )
    cbgs: bool = opt(False, "draw training samples so that each object class gets the same number (CBGS)")
    paste: PasteConfig | None = opt(None, "ground-truth pasting, or null")
    image: ImageAugmentConfig = opt(ImageAugmentConfig, "image augmentation")
    space: SpaceAugmentConfig = opt(SpaceAugmentConfig, "3D augmentation")
    augment: bool = opt(True, "apply random augmentation in training")

    @property
    def frames(self) -> int:
        """Moments whose images a sample has."""
        return 1 if self.previous is None else 2


@dataclass(frozen=True)
class SwinConfig:
    """Size of the Swin transformer."""

    embed: int = opt(96, "channels of the first stage", low=4)
    depths: tuple[int, ...] = opt((2, 2, 6, 2), "blocks of each stage", low=1)
    heads: tuple[int, ...] = opt((3, 6, 12, 24), "attention heads of each stage", low=1)
    window: int = opt(7, "side of the attention window", low=2)
    drop_path: float = opt(0.2, "stochastic depth of the last block (linear from zero)", low=0, high=0.9)


@dataclass(frozen=True)
class VoVNetConfig:
    """Size of VoVNet with squeeze-excitation; the defaults are VoVNet-99."""

    stem: tuple[int, int, int] = opt((64, 64, 128), "channels of the three convolutions of the stem", low=4)
    inner: tuple[int, int, int, int] = opt((128, 160, 192, 224), "channels of a block's layers, by stage", low=4)
    channels: tuple[int, int, int, int] = opt((256, 512, 768, 1024), "channels of each stage's output", low=4)
    blocks: tuple[int, int, int, int] = opt((1, 3, 9, 3), "blocks of each stage", low=1)
    layers: int = opt(5, "3 x 3 convolutions of a block", low=1)


@dataclass(frozen=True)
class ViewTransformConfig:
    """Lift-splat: from image features to the bird's-eye view."""

    kind: str = opt("depth_lss", "depth_lss reads LiDAR depth, lss images only", choices=("depth_lss", "lss"))
    xbound: tuple[float, float, float] = opt((-54.0, 54.0, 0.3), "BEV x range and cell, m")
    ybound: tuple[float, float, float] = opt((-54.0, 54.0, 0.3), "BEV y range and cell, m")
    zbound: tuple[float, float, float] = opt((-10.0, 10.0, 20.0), "BEV z range and cell, m")
    dbound: tuple[float, float, float] = opt((1.0, 60.0, 0.5), "depth bins: first, end, step, m")
    channels: int = opt(80, "context channels", low=1)
    downsample: int = opt(2, "stride from the splat grid to the BEV grid", low=1, high=2)
    truncate: bool = opt(
        False,
        "count points up to one cell below a lower bound in the first cell, as mit-bevfusion and mmdet3d do; "
        "for weights trained there",
    )


@dataclass(frozen=True)
class CameraConfig:
    """The camera branch."""

    backbone: str = opt("swin", "swin, vovnet, or the name of a timm model with features_only")
    swin: SwinConfig = opt(SwinConfig, "size of the Swin backbone")
    vovnet: VoVNetConfig = opt(VoVNetConfig, "size of the VoVNet backbone")
    norm_eval: bool = opt(
        False, "BatchNorms of the image backbone keep the statistics that they start with; for pretrained ones"
    )
    pretrained: str | None = opt(None, "checkpoint of the image backbone alone")
    normalize: str = opt(
        "imagenet",
        "ImageNet's mean and deviation; imagenet_bgr: blue first, as the VoVNet that PETRv2 starts from learned it",
        choices=("imagenet", "imagenet_bgr"),
    )
    image_size: tuple[int, int] = opt((256, 704), "height and width of the network's image", low=32)
    neck_channels: int = opt(256, "channels of the image feature pyramid", low=8)
    view: ViewTransformConfig | None = opt(
        ViewTransformConfig, "view transform, or null for a model that has none: petrv2"
    )


@dataclass(frozen=True)
class LidarConfig:
    """The LiDAR branch: hard voxelisation and the sparse encoder."""

    voxel_size: tuple[float, float, float] = opt((0.075, 0.075, 0.2), "voxel, m", above=0)
    max_points: int = opt(10, "points kept in a voxel", low=1)
    max_voxels: tuple[int, int] = opt((120000, 160000), "voxels kept a sample in training and in evaluation", low=1)
    features: int = opt(5, "features of a point", low=4)
    channels: tuple[int, int, int, int] = opt((16, 32, 64, 128), "channels of the four stages", low=4)
    blocks: int = opt(2, "residual blocks a stage", low=1)
    out_channels: int = opt(128, "channels of each z slice of the output", low=4)


@dataclass(frozen=True)
class DecoderConfig:
    """SECOND backbone and FPN on the bird's-eye view."""

    fused_channels: int = opt(256, "channels after the fuser", low=8)
    channels: tuple[int, int] = opt((128, 256), "channels of the two stages", low=8)
    layers: int = opt(5, "convolutions a stage after its first", low=0)
    neck_channels: int = opt(256, "channels of each of the two outputs that are concatenated", low=8)


@dataclass(frozen=True)
class ObjectHeadConfig:
    """Detection head: TransFusion's in BEVFusion; of petrv2's, only the queries and the weights are set here."""

    proposals: int = opt(200, "queries", low=1)
    hidden: int = opt(128, "width", low=8)
    attention_heads: int = opt(8, "attention heads", low=1)
    ffn: int = opt(256, "width of the feed-forward layer", low=8)
    dropout: float = opt(0.1, "dropout", low=0, high=0.9)
    nms_kernel: int = opt(3, "heatmap local-maximum window", low=1)
    box_z: str = opt(
        "centre",
        "what the height branch predicts: z of a box's centre, or of its top, as weights trained by mit-bevfusion do",
        choices=("centre", "top"),
    )
    loss_weight: float = opt(1.0, "weight of the task", low=0)
    heatmap_weight: float = opt(1.0, "weight of the heatmap loss", low=0)
    class_weight: float = opt(1.0, "weight of the classification loss", low=0)
    box_weight: float = opt(0.25, "weight of the box loss", low=0)


@dataclass(frozen=True)
class MapHeadConfig:
    """BEV map segmentation head."""

    xbound: tuple[float, float, float] = opt((-50.0, 50.0, 0.5), "map x range and cell, m")
    ybound: tuple[float, float, float] = opt((-50.0, 50.0, 0.5), "map y range and cell, m")
    loss: str = opt("focal", "pixel loss", choices=("focal", "xent"))
    focal_alpha: float | None = opt(
        None, "weight of the class's pixels in the focal loss, the others get 1 - it; null: both 1", low=0, high=1
    )
    class_weights: tuple[float, ...] = opt((), "weight of each class of data.map_classes; empty: 1 each", low=0)
    loss_weight: float = opt(1.0, "weight of the task", low=0)


@dataclass(frozen=True)
class PetrConfig:
    """PETRv2: positions in space encoded into image features, and a transformer for each head."""

    depth_bins: int = opt(64, "points along the ray of a feature, further apart with the distance", low=1)
    depth_start: float = opt(1.0, "depth of the first point, m; the last bin ends where position_range does", above=0)
    position_range: tuple[float, float, float, float, float, float] = opt(
        (-61.2, -61.2, -10.0, 61.2, 61.2, 10.0), "bounds of the points, x, y, z lower and upper, m"
    )
    hidden: int = opt(256, "width", low=8)
    layers: int = opt(6, "decoder layers, each with a loss of its own", low=1)
    attention_heads: int = opt(8, "attention heads", low=1)
    ffn: int = opt(2048, "width of the feed-forward layers", low=8)
    dropout: float = opt(0.1, "dropout", low=0, high=0.9)
    predictions: int = opt(300, "boxes given for a sample, the best of all queries and classes", low=1)
    map_queries: tuple[int, int] = opt(
        (25, 25), "queries of the map head along x and y; three layers make eight cells of each", low=1
    )


@dataclass(frozen=True)
class Mmdet3dConfig:
    """A model and data set that mmdet3d builds, from a config whose code is run: only with --engine mmdet3d."""

    config: str = opt("", "the mmdet3d config (Python)")


@dataclass(frozen=True)
class ModelConfig:
    """BEVFusion or PETRv2; a sensor or head that is null is not built."""

    type: str = opt("bevfusion", "model family", choices=("bevfusion", "petrv2", "mmdet3d"))
    point_cloud_range: tuple[float, float, float, float, float, float] = opt(
        (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0), "x, y, z lower and upper bounds, m"
    )
    camera: CameraConfig | None = opt(CameraConfig, "camera branch, or null")
    lidar: LidarConfig | None = opt(LidarConfig, "LiDAR branch, or null")
    point_dtype: str = opt(
        "fp32",
        "number format that points are rounded to first; fp16 moves far ones by centimetres, and is what "
        "mit-bevfusion's weights were trained with",
        choices=("fp32", "fp16"),
    )
    decoder: DecoderConfig = opt(DecoderConfig, "BEV decoder")
    shared_decoder: bool = opt(True, "one BEV decoder for both heads, or false: one for each")
    object: ObjectHeadConfig | None = opt(ObjectHeadConfig, "detection head, or null")
    map: MapHeadConfig | None = opt(None, "map head, or null")
    petr: PetrConfig | None = opt(None, "what only petrv2 has, or null")
    mmdet3d: Mmdet3dConfig | None = opt(None, "where a model of mmdet3d comes from, or null")
    norm_momentum: float = opt(
        0.01,
        "how fast BatchNorm statistics of the LiDAR encoder and the BEV decoder follow the batches; "
        "0.01 needs some 300 iterations to settle, so that short runs want more",
        above=0,
        high=1,
    )
    checkpointing: tuple[str, ...] = opt(
        (), "parts whose activations are recomputed: camera, lidar, decoder (of petrv2: those of its heads)"
    )
    load_from: tuple[str, ...] = opt(
        (), "checkpoints whose weights a new run starts from, one after the other; a LiDAR model's, for example"
    )
    freeze: tuple[str, ...] = opt(
        (), "modules that do not learn, such as encoders.camera.backbone; their norms and dropout act as in evaluation"
    )

    @property
    def reads_points(self) -> bool:
        """Whether the model looks at LiDAR points."""
        view = None if self.camera is None else self.camera.view
        return self.lidar is not None or (view is not None and view.kind == "depth_lss")


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    batch: int = opt(4, "samples a GPU and step", low=1)
    workers: int = opt(4, "data loading processes a GPU", low=0)
    epochs: int = opt(6, "epochs", low=1)
    schedule_iters: int | None = opt(None, "length of the schedule in iterations, instead of epochs", low=1)
    accumulate: int = opt(1, "batches added up for one optimizer step", low=1)
    log_interval: int = opt(50, "iterations between text lines", low=1)
    tensorboard: bool = opt(False, "also write event files for TensorBoard, a point with every text line")
    eval_interval: int = opt(1, "epochs between evaluations; 0 for none", low=0)
    checkpoint_interval: int | None = opt(None, "iterations between checkpoints inside an epoch", low=1)
    keep: int = opt(3, "checkpoints kept, beside the best", low=1)
    best: str = opt("", "metric of the best checkpoint: mAP, NDS or mIoU; empty: NDS, else mIoU")
    ema: float = opt(0.0, "decay of the weight average; 0 for none", low=0, high=0.99999)
    deterministic: bool = opt(False, "deterministic algorithms, slower on a GPU")
    cuda_graphs: bool = opt(
        True, "on a GPU, record the parts of fixed shape once and replay them; their memory stays allocated"
    )
    compile: bool = opt(
        False, "torch.compile for the parts of fixed shape, on a GPU; numbers stay, a start takes longer"
    )
    sync_bn: bool = opt(False, "share BatchNorm statistics between GPUs")
    gradient_compression: str = opt(
        "none",
        "number format of the gradients that GPUs exchange; fp16 halves what is sent and makes the loss scale smaller",
        choices=("none", "fp16", "bf16"),
    )
    bucket_mb: float = opt(25.0, "size of a bucket of gradients that GPUs exchange at once, MiB", above=0)
    static_graph: bool = opt(True, "several GPUs rely on every step using the same parameters")
    on_nonfinite: str = opt(
        "skip",
        "what follows a step that is not finite, beside skipping it: skip, nothing until the budget is used up; "
        "lower_scale, the loss scale stays below from there on; fp32_module, the module that made it runs in FP32 from "
        "there on; rewind, with the budget used up back to the last checkpoint and another data order; halt, the end",
        choices=("skip", "lower_scale", "rewind", "fp32_module", "halt"),
    )
    nonfinite_in_a_row: int = opt(50, "skipped steps in a row that use the budget up (exit code 5)", low=1)
    nonfinite_per_thousand: int = opt(
        200, "skipped steps among 1000 that do not yet, without those of the search for a loss scale", low=0, high=1000
    )
    rewinds: int = opt(3, "rewinds before the run ends", low=0)
    incidents: int = opt(3, "bundles of steps that were not finite, kept below incident/; 0 for none", low=0)
    incident_gb: float = opt(10.0, "size of all of them together, GB", above=0)


@dataclass(frozen=True)
class ParamGroupConfig:
    """Learning rate and weight decay of the parameters whose name contains `match`."""

    match: str = opt("", "part of the parameter's name")
    lr: float = opt(1.0, "factor on the learning rate", low=0)
    decay: float = opt(1.0, "factor on the weight decay", low=0)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the schedules."""

    lr: float = opt(2e-4, "peak learning rate", above=0)
    base_batch: int | None = opt(None, "global batch that base_lr belongs to", low=1)
    base_lr: float | None = opt(None, "learning rate at base_batch", above=0)
    lr_scaling: str = opt("none", "rule from base_lr to the global batch", choices=("none", "linear", "sqrt"))
    weight_decay: float = opt(0.01, "weight decay", low=0)
    betas: tuple[float, float] = opt((0.9, 0.999), "AdamW betas", low=0, high=0.99999)
    clip: float | None = opt(35.0, "largest gradient norm (L2); null: no clipping", above=0)
    schedule: str = opt("cosine", "shape of the schedule", choices=("cosine", "cyclic", "steps", "constant"))
    warmup: int = opt(500, "iterations of linear warm-up", low=0)
    warmup_ratio: float = opt(1 / 3, "first learning rate over the peak", low=0, high=1)
    min_ratio: float = opt(1e-3, "last learning rate over the peak", low=0, high=1)
    cosine_steps: int | None = opt(
        None,
        "cosine: falls in this many equal steps, in mmcv the number of epochs; null: with every iteration",
        low=1,
    )
    steps: tuple[float, ...] = opt((), "steps: shares of the run at which the rate falls", above=0, high=1)
    step_factor: float = opt(0.1, "steps: what it is multiplied with there", above=0)
    cyclic_peak: float = opt(10.0, "cyclic: peak over lr", above=0)
    cyclic_end: float = opt(1e-4, "cyclic: end over lr", above=0)
    cyclic_up: float = opt(0.4, "cyclic: share of the run that rises", low=0.01, high=0.99)
    cyclic_momentum: bool = opt(False, "beta1 falls to 0.85/0.95 of itself and comes back, with the cycle's timing")
    groups: tuple[ParamGroupConfig, ...] = opt((), "factors for parts of the model; the first match counts")


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats."""

    dtype: str = opt(
        "auto",
        "auto: BF16 from capability 8.0, FP16 on 7.x, FP32 on a CPU",
        choices=("auto", "fp16", "bf16", "fp32"),
    )
    loss_scale: float | str = opt("dynamic", "dynamic, or a fixed number", above=0)
    init_scale: float = opt(65536.0, "first dynamic loss scale", above=0)
    growth_factor: float = opt(2.0, "factor after growth_interval good steps", low=1)
    backoff_factor: float = opt(0.5, "factor after an overflow", above=0, high=1)
    growth_interval: int = opt(2000, "good steps before the scale grows", low=1)
    fp32_modules: tuple[str, ...] = opt((), "module name patterns (fnmatch) that run in FP32")


@dataclass(frozen=True)
class Config:
    """Everything that describes a run."""

    name: str = opt("bevctl", "name of the config; the default work_dir is runs/<name>")
    seed: int = opt(0, "seed of weights, order and augmentation", low=0)
    device: str = opt("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"))
    work_dir: str | None = opt(None, "folder of the run")
    data: DataConfig = opt(DataConfig, "data")
    model: ModelConfig = opt(ModelConfig, "model")
    train: TrainConfig = opt(TrainConfig, "loop")
    optim: OptimConfig = opt(OptimConfig, "optimizer and schedule")
    precision: PrecisionConfig = opt(PrecisionConfig, "number formats")
    expect: dict[str, str] = opt(
        dict, "expected range of a metric: low:high, [low, high] or low:high@first_iter:last_iter"
    )
