"""Images: image data sets from disk, VGG and ResNet."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="image data sets from disk, VGG and ResNet",
    modules=("fedsign.data.images", "fedsign.models.resnet", "fedsign.models.vgg"),
    rows={
        "dataset": {
            "mnist": ("fedsign.data.images.mnist:mnist", "MNIST from a folder, 70,000 images of 28x28"),
            "fashion_mnist": ("fedsign.data.images.mnist:fashion_mnist", "Fashion-MNIST from a folder"),
            "svhn": (
                "fedsign.data.images.svhn:svhn",
                "street view house numbers from a folder, 99,289 images of 32x32",
            ),
            "cifar10": ("fedsign.data.images.cifar:cifar10", "CIFAR-10 from a folder, 60,000 images of 32x32"),
            "cifar100": ("fedsign.data.images.cifar:cifar100", "CIFAR-100 from a folder, 100 classes"),
            "cinic10": ("fedsign.data.images.cinic10:cinic10", "CINIC-10 from a folder, 180,000 images of 32x32"),
            "image_folder": ("fedsign.data.images.image_folder:image_folder", "your images, one folder per class"),
        },
        "model": {
            "vgg8": ("fedsign.models.vgg:vgg8", "VGG with 5 convolutions, for images of at least 32x32"),
            "vgg11": ("fedsign.models.vgg:vgg11", "VGG with 8 convolutions, for images of at least 32x32"),
            "vgg16": ("fedsign.models.vgg:vgg16", "VGG with 13 convolutions, for images of at least 32x32"),
            "resnet20": ("fedsign.models.resnet:resnet20", "He's residual network for CIFAR, 0.27 M parameters"),
            "resnet18": ("fedsign.models.resnet:resnet18", "torchvision's ResNet-18 with a stem for small images"),
        },
    },
    named_by={"image_folder": "root"},
    moved={
        f"fedsign.data.{name}": f"fedsign.data.images.{name}"
        for name in ("cifar", "cinic10", "image_folder", "mnist", "svhn")
    },
)
