// A button on every code block that copies its text, of a Python session the input only.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // not in a secure context
  for (const block of document.querySelectorAll("[class*=highlight-]:not(.highlight-none) > .highlight")) {
    const button = Object.assign(document.createElement("button"), { className: "copy", type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      const lines = block.querySelector("pre").textContent.trimEnd().split("\n");
      const input = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4));
      await navigator.clipboard.writeText((input.length ? input : lines).join("\n"));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
