// Small helpers for DOM nodes.

export const find = (id) => document.getElementById(id);

export function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

export function button(label, action) {
  const node = element("button", "", label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

// A small copy of a picture. Its name stands beside it, so nothing is read out.
export function thumbnailNode({ thumbnail }) {
  const node = element("img", "thumbnail");
  node.src = thumbnail;
  node.alt = "";
  return node;
}

// Make `parent` have the children of `fresh`, and leave alone those that are equal: focus and selection in them stay.
export function patch(parent, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, i) => {
    const there = parent.childNodes[i];
    if (!there) parent.append(node);
    else if (!there.isEqualNode(node)) there.replaceWith(node);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

// Copy a text, and say so on the button for a moment. Pages of plain http from another machine have no clipboard API.
export async function copy(text, from) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = element("textarea", "unseen");
    box.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(box);
    box.select();
    done = document.execCommand("copy");
    box.remove();
    from.focus();
  }
  from.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => (from.textContent = "Copy"), 1500);
}
