// The files that go with the next message: chosen, dropped or pasted; shown above the message box.

import { button, element, find, thumbnailNode } from "/static/dom.js";
import { readFile, requireRoom } from "/static/files.js";

const [list, wrong, input] = ["files", "file-error", "file"].map(find);

export class Attachments {
  constructor(settings) {
    this.settings = settings;
    this.files = [];
    this.reading = 0; // calls of add that have not ended
    find("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      void this.add([...input.files]);
      input.value = "";
    });
    const main = document.querySelector("main");
    main.addEventListener("dragover", (event) => event.preventDefault());
    main.addEventListener("drop", (event) => {
      event.preventDefault();
      void this.add([...event.dataTransfer.files]);
    });
    find("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      void this.add([...event.clipboardData.files]);
    });
  }

  async add(files) {
    const problems = [];
    this.reading += 1;
    list.setAttribute("aria-busy", "true");
    for (const file of files) {
      try {
        const read = await readFile(file, this.settings());
        requireRoom(this.files, read);
        this.files.push(read);
      } catch (error) {
        problems.push(error.message);
      }
      this.draw();
    }
    this.reading -= 1;
    if (!this.reading) list.removeAttribute("aria-busy");
    wrong.textContent = problems.join(" ");
    wrong.hidden = !problems.length;
  }

  // The files, which are then gone from here.
  take() {
    const { files } = this;
    this.files = [];
    wrong.hidden = true;
    this.draw();
    return files;
  }

  draw() {
    list.replaceChildren(
      ...this.files.map((file) => {
        const remove = button("×", () => {
          this.files = this.files.filter((each) => each !== file);
          this.draw();
          find("attach").focus();
        });
        remove.setAttribute("aria-label", `Remove ${file.name}`);
        return element("li", "", ...(file.thumbnail ? [thumbnailNode(file)] : []), `${file.name} (${file.note}) `, remove);
      }),
    );
  }
}
