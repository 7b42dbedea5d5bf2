"""Names that an input file may use, known without importing torch. A test holds the models against torchvision."""

from __future__ import annotations

from typing import NamedTuple


class DatasetFacts(NamedTuple):
    """What is known of a data set before it is opened."""

    on_disk: bool  # needs data_dir
    image_size: int  # default edge, pixels
    classes: int | None  # None: counted in data_dir
    test_samples: int | None = None  # None: counted there, or split off the whole
    train_samples: int | None = None  # None: counted there; a folder may hold others than were published


DATASETS: dict[str, DatasetFacts] = {
    "digits": DatasetFacts(on_disk=False, image_size=8, classes=10, test_samples=359, train_samples=1438),
    "synthetic": DatasetFacts(on_disk=False, image_size=32, classes=10, test_samples=512, train_samples=2048),
    "cifar10": DatasetFacts(on_disk=True, image_size=32, classes=10, test_samples=10_000),
    "cifar100": DatasetFacts(on_disk=True, image_size=32, classes=100, test_samples=10_000),
    "caltech101": DatasetFacts(on_disk=True, image_size=224, classes=101),
    "caltech256": DatasetFacts(on_disk=True, image_size=224, classes=256),
    "imagenet": DatasetFacts(on_disk=True, image_size=224, classes=1000, test_samples=50_000),
    "imagefolder": DatasetFacts(on_disk=True, image_size=224, classes=None),
}

# torchvision.models.list_models(module=torchvision.models) of torchvision 0.26
_NAMES = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169
    densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4
    efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s
    googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2
    mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf
    regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf
    regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
    resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11
    vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32
    wide_resnet101_2 wide_resnet50_2
"""
TORCHVISION_MODELS: tuple[str, ...] = tuple(_NAMES.split())
