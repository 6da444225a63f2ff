"""The Chinese pages: navigation and labels in Chinese, and what tells browsers the language."""

from __future__ import annotations

TITLES = {
    "Home": "首页",
    "Guide": "指南",
    "Walkthrough": "教程笔记本",
    "A real training loop": "真实的训练循环",
    "Names elsewhere": "名称对照",
    "Others' programs": "别人的程序",
    "Algorithms": "算法",
    "All-reduce, step by step": "全归约，一步一步看",
    "Performance": "性能",
    "Log of measurements": "测量记录",
    "Cluster": "多个进程，多台机器",
    "Troubleshooting": "排错",
    "Design notes": "设计说明",
    "Reference": "API 参考",
    "Collectives": "集合通信",
    "The step": "训练的一步",
    "Gluon": "Gluon",
    "Several processes": "多个进程",
    "Checkpoints": "检查点",
    "Training runs": "训练过程",
    "Diagnostics": "诊断",
    "Devices": "设备",
}

ENGLISH = "（英文）"  # the pages behind these titles


def on_nav(nav, config, files):
    """Keep the titles of mkdocs.yml; a page without one gets its heading when it is read."""
    for item in _items(nav.items):
        item.in_english = vars(item).get("title")
    return nav


def on_page_context(context, page, config, nav):
    """Choose the language of the theme and of the navigation before a page is rendered."""
    chinese = _is_chinese(page)
    config.theme["language"] = "zh" if chinese else "en"
    for item in _items(nav.items):
        if item.in_english in TITLES:
            item.title = f"{TITLES[item.in_english]}{ENGLISH}" if chinese else item.in_english
    return context


def on_post_page(output: str, page, config) -> str:
    """Say that it is simplified Chinese."""
    return (
        output.replace('<html lang="zh"', '<html lang="zh-CN"', 1) if _is_chinese(page) else output
    )


def _is_chinese(page) -> bool:
    return ".zh-CN." in page.file.src_uri


def _items(items):
    for item in items:
        yield item
        yield from _items(item.children or ())
