"""CenterPoint on pillars, from mmdet3d's own config, made small for a CPU and pointed at bevctl's synthetic set.

No object is pasted: that would want a database in mmdet3d's format. Every operation has a CPU form.
"""

_base_ = "mmdet3d::centerpoint/centerpoint_pillar02_second_secfpn_8xb4-cyclic-20e_nus-3d.py"

voxel_size = [0.4, 0.4, 8]
point_cloud_range = [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
pillars = {"voxel_size": voxel_size, "max_num_points": 10, "max_voxels": (8000, 8000)}
model = {
    "data_preprocessor": {"voxel_layer": pillars},
    "pts_voxel_encoder": {"feat_channels": [16], "voxel_size": tuple(voxel_size)},
    "pts_middle_encoder": {"in_channels": 16, "output_shape": (256, 256)},
    "pts_backbone": {"in_channels": 16, "out_channels": [16, 32, 64], "layer_nums": [1, 1, 1]},
    "pts_neck": {"in_channels": [16, 32, 64], "out_channels": [32, 32, 32]},
    "pts_bbox_head": {"in_channels": 96, "share_conv_channel": 32, "bbox_coder": {"voxel_size": voxel_size[:2]}},
    "train_cfg": {"pts": {"grid_size": [256, 256, 1], "voxel_size": voxel_size}},
    "test_cfg": {"pts": {"voxel_size": voxel_size[:2]}},
}

class_names = [
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
]
read = [
    {"type": "LoadPointsFromFile", "coord_type": "LIDAR", "load_dim": 5, "use_dim": 5},
    {"type": "LoadPointsFromMultiSweeps", "sweeps_num": 2, "use_dim": [0, 1, 2, 3, 4], "remove_close": True},
]
train_pipeline = [
    *read,
    {"type": "LoadAnnotations3D", "with_bbox_3d": True, "with_label_3d": True},
    {
        "type": "GlobalRotScaleTrans",
        "rot_range": [-0.39, 0.39],
        "scale_ratio_range": [0.95, 1.05],
        "translation_std": [0, 0, 0],
    },
    {"type": "RandomFlip3D", "sync_2d": False, "flip_ratio_bev_horizontal": 0.5, "flip_ratio_bev_vertical": 0.5},
    {"type": "PointsRangeFilter", "point_cloud_range": point_cloud_range},
    {"type": "ObjectRangeFilter", "point_cloud_range": point_cloud_range},
    {"type": "ObjectNameFilter", "classes": class_names},
    {"type": "PointShuffle"},
    {"type": "Pack3DDetInputs", "keys": ["points", "gt_bboxes_3d", "gt_labels_3d"]},
]
eval_pipeline = [
    *read,
    {"type": "PointsRangeFilter", "point_cloud_range": point_cloud_range},
    {"type": "Pack3DDetInputs", "keys": ["points"]},
]

data_root = "data/synth/"
train_dataloader = {
    "batch_size": 2,
    "num_workers": 0,
    "persistent_workers": False,
    "dataset": {"dataset": {"data_root": data_root, "ann_file": "synth_infos_train.pkl", "pipeline": train_pipeline}},
}
val_dataloader = {
    "num_workers": 0,
    "persistent_workers": False,
    "dataset": {"data_root": data_root, "ann_file": "synth_infos_val.pkl", "pipeline": eval_pipeline},
}
